"""SGD: FP32 parameters against `torch.optim.SGD`, 16-bit ones against its formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import SGD
from tests.support.optim.against_formula import (
    EPS,
    MODES,
    assert_rounded_once,
    assert_update_is_not_rounded,
    gradients,
    parameter,
    train,
)

KINDS = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]
OPTIONS = [
    {**kind, "maximize": maximize, "weight_decay": decay}
    for kind, maximize, decay in itertools.product(KINDS, (False, True), (0.0, 0.1))
]


def clamped_gradients(steps: int) -> list[torch.Tensor]:
    """Gradients of 4 at most, for `fp32_bound`."""
    return [grad.clamp(-4, 4) for grad in gradients(steps)]


def fp32_bound(steps: int, lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart on equal gradients of 4 at most.

    Per step and implementation: one rounding of the weight, and an update with a rounding for each of at most six
    operations, on values up to lr · 5 / (1 - 0.9) (decay included), themselves carrying up to ten steps of such errors.
    """
    return 2 * steps * EPS * (largest + lr * 50 * 6 * 10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-3)], ids=["number", "tensor"])
def test_fp32_parameters_get_torchs_sgd(options, lr):
    steps = 30
    ours, theirs = parameter(), parameter()
    mine, reference = SGD([ours], lr=lr, backend="eager", **options), torch.optim.SGD([theirs], lr=lr, **options)
    train(mine, clamped_gradients(steps))
    train(reference, clamped_gradients(steps))
    bound = fp32_bound(steps, float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of a step with a unit gradient: a wrong term would show
    if options["momentum"]:
        buffer = reference.state[theirs]["momentum_buffer"]
        # Four roundings a step and implementation of values up to 50, ten steps deep.
        assert (mine.state[ours]["momentum_buffer"] - buffer).abs().max() <= 2 * 4 * 10 * 50 * EPS
    else:
        assert set(mine.state[ours]) <= {"step"}


def formula(weight, grad, state, step, *, lr, momentum, weight_decay, maximize, dampening=0.0, nesterov=False):
    """The algorithm in the documentation of `torch.optim.SGD`."""
    grad, size = -grad if maximize else grad, grad.abs() + weight_decay * weight.abs()
    grad = grad + weight_decay * weight
    if not momentum:
        return -lr * grad, {}, lr * size
    new = grad
    if step > 1:
        buffer = state["momentum_buffer"]
        new = momentum * buffer + (1 - dampening) * grad
        buffer_size = momentum * buffer.abs() + (1 - dampening) * size
    else:
        buffer_size = size
    direction, size = (grad + momentum * new, size + momentum * buffer_size) if nesterov else (new, buffer_size)
    return -lr * direction, {"momentum_buffer": (new, size)}, lr * size


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    """FP32 arithmetic performs at most six operations on each term."""
    errors = {"update_error": 12, "state_error": 12}
    assert_rounded_once(SGD, formula, dtype, rounding, state_rounding, lr=1e-2, **errors, **options)


def test_the_update_uses_the_buffer_before_it_is_rounded():
    hyper = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
    assert_update_is_not_rounded(SGD, formula, update_error=12, **hyper)
