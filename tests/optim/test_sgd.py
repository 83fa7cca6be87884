"""SGD: FP32 parameters against `torch.optim.SGD`. `test_split.py` compares 16-bit ones with FP32."""

import itertools

import pytest
import torch

from hf_lowprec.optim import SGD
from tests.support.optim.against_formula import (
    EPS,
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
