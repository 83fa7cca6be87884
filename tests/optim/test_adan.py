"""Adan: each step against the paper's formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Adan
from tests.support.optim.against_formula import (
    BF16,
    FP32,
    MODES,
    assert_rounded_once,
    gradients,
    parameter,
)
from tests.support.optim.gradient_dtypes import allow_gradients_in

OPTIONS = [
    {"maximize": maximize, "weight_decay": decay, "no_prox": no_prox}
    for maximize, (decay, no_prox) in itertools.product((False, True), ((0.0, False), (1.0, False), (1.0, True)))
]
BETAS = [(0.98, 0.92, 0.99), (0.9, 0.5, 0.95)]


def formula(weight, grad, state, step, *, lr, betas, weight_decay, maximize, no_prox, eps=1e-8):
    """arXiv:2208.06677, Alg. 1 without restarts, with the sizes of its terms.

    Betas are one minus the paper's, moments start at zero and are bias-corrected, and the first difference is zero, all
    as in the authors' code.
    """
    (beta1, beta2, beta3), grad = betas, -grad if maximize else grad
    m, v, n, previous = (state[name] for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"))
    difference = grad - previous if step > 1 else torch.zeros_like(grad)
    apart = (grad.abs() + previous.abs()) * (step > 1)
    new_m, m_size = beta1 * m + (1 - beta1) * grad, beta1 * m.abs() + (1 - beta1) * grad.abs()
    new_v, v_size = beta2 * v + (1 - beta2) * difference, beta2 * v.abs() + (1 - beta2) * apart
    new_n = beta3 * n + (1 - beta3) * (grad + beta2 * difference) ** 2
    n_size = beta3 * n + (1 - beta3) * (grad.abs() + beta2 * apart) ** 2
    scale = lr / ((new_n / (1 - beta3**step)).sqrt() + eps)
    change = scale * (new_m / (1 - beta1**step) + beta2 * new_v / (1 - beta2**step))
    size = scale * (m_size / (1 - beta1**step) + beta2 * v_size / (1 - beta2**step)) * (1 + n_size / new_n)
    decay = lr * weight_decay
    new_weight = (1 - decay) * weight - change if no_prox else (weight - change) / (1 + decay)
    states = {"exp_avg": (new_m, m_size), "exp_avg_diff": (new_v, v_size), "exp_avg_sq": (new_n, n_size)}
    return new_weight - weight, {**states, "previous_grad": (grad, 0 * grad)}, size + decay * weight.abs()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("eps", [1e-8, 0.1])
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_papers_adan_rounded_once(dtype, rounding, state_rounding, eps, betas, options):
    assert_rounded_once(Adan, formula, dtype, rounding, state_rounding, lr=1e-2, betas=betas, eps=eps, **options)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_are_kept_to_the_nearest_bf16(dtype):
    param = parameter(BF16)
    allow_gradients_in(dtype, [param])
    optimizer = Adan([param], state_rounding="stochastic")
    for grad in gradients(3, dtype):
        param.grad = grad
        optimizer.step()
        assert torch.equal(optimizer.state[param]["previous_grad"], grad.to(BF16))
