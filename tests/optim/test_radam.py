"""RAdam: FP32 parameters against `torch.optim.RAdam`. `test_split.py` compares 16-bit ones with FP32."""

import itertools

import pytest
import torch

from hf_lowprec.optim import RAdam
from tests.support.optim.against_formula import (
    EPS,
    gradients,
    parameter,
    train,
)

STEPS = 50
OPTIONS = [
    {"decoupled_weight_decay": decoupled, "maximize": maximize, "weight_decay": decay}
    for (decoupled, decay), maximize in itertools.product(((False, 0.0), (False, 0.1), (True, 0.1)), (False, True))
]
# The last three never leave the first phase: ρ∞ is 5, 4 (a zero in the rectification's denominator) and 1.
RATES = [(1e-2, (0.9, 0.999)), (torch.tensor(3e-3), (0.8, 0.95))]
RATES += [(1e-2, (0.9, 2 / 3)), (1e-2, (0.5, 0.6)), (1e-2, (0.0, 0.0))]


def fp32_bound(lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart in `STEPS` steps while their gradients are the same.

    Rectified steps are Adam's times r < 1: 2048 half ulps of lr (see `test_adam.py`). Others are lr · m̂: four roundings
    a step of terms up to 5, ten steps deep: 200. Beside them the weight is rounded twice per implementation.
    """
    return STEPS * EPS * (4 * largest + 2048 * lr)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("lr", "betas"), RATES, ids=str)
def test_fp32_parameters_get_torchs_radam(options, lr, betas):
    ours, theirs = parameter(), parameter()
    mine = RAdam([ours], lr=lr, betas=betas, **options)
    reference = torch.optim.RAdam([theirs], lr=lr, betas=betas, **options)
    bound = fp32_bound(float(lr), 5.0)
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show
    for grad in gradients(STEPS):
        for optimizer in (mine, reference):
            train(optimizer, [grad])
        assert (ours - theirs).abs().max().item() <= bound
    assert ours.abs().max() <= 5.0
    assert set(mine.state[ours]) == set(reference.state[theirs])
    for name, value in reference.state[theirs].items():
        # Four roundings a step and implementation, of terms up to max g² < 25.
        assert (mine.state[ours][name] - value).abs().max() <= 2 * 4 * STEPS * EPS * 25, name


def test_eps_is_added_where_torch_adds_it():
    """Before the bias correction: with an ε of the size of √v it matters, by a factor of 1/√(1-β2ᵗ) = 13 at first."""
    ours, theirs = parameter(), parameter()
    for cls, param in ((RAdam, ours), (torch.optim.RAdam, theirs)):
        train(cls([param], lr=1e-2, eps=0.1), gradients(STEPS))
    assert (ours - theirs).abs().max().item() <= fp32_bound(1e-2, theirs.abs().max().item())
