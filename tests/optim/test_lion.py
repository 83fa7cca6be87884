"""Lion: each step against the paper's formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Lion
from tests.support.optim.against_formula import (
    BF16,
    EPS,
    FP32,
    MODES,
    assert_rounded_once,
    train,
)

OPTIONS = [
    {"maximize": maximize, "weight_decay": decay} for maximize, decay in itertools.product((False, True), (0, 1.0))
]


def formula(weight, grad, state, step, *, lr, betas, weight_decay, maximize):
    """arXiv:2302.06675, Alg. 2, with the sizes of its terms."""
    (beta1, beta2), m, grad = betas, state["exp_avg"], -grad if maximize else grad
    update = -lr * ((beta1 * m + (1 - beta1) * grad).sign() + weight_decay * weight)
    size = beta2 * m.abs() + (1 - beta2) * grad.abs()
    return update, {"exp_avg": (beta2 * m + (1 - beta2) * grad, size)}, lr * (1 + weight_decay * weight.abs())


def undecided(weight, grad, state, *, lr, betas, weight_decay, maximize):
    """Where FP32 may see another sign: three roundings of each term."""
    terms = betas[0] * state["exp_avg"], (1 - betas[0]) * (-grad if maximize else grad)
    unclear = sum(terms).abs() <= 4 * EPS * sum(map(torch.abs, terms))
    assert unclear.sum() <= 2
    return unclear


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.9)], ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_papers_lion_rounded_once(dtype, rounding, state_rounding, betas, options):
    hyper = {"lr": 1e-2, "betas": betas, **options}
    assert_rounded_once(Lion, formula, dtype, rounding, state_rounding, undecided, **hyper)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_first_step_is_the_sign_of_the_gradient(dtype):
    grad = torch.tensor([1e4, -1e4, 1e-30, -1e-30, 0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    param = torch.nn.Parameter(torch.zeros(9, dtype=dtype))
    train(Lion([param], lr=2.0**-7), [grad])
    assert (param[:-1] / -(2.0**-7)).tolist() == [1, -1, 1, -1, 0, 0, 1, -1]
    assert param[-1].isnan()
