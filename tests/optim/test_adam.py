"""Adam: FP32 parameters against `torch.optim.Adam`; with decoupled decay it is AdamW, bit for bit."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Adam, AdamW
from tests.support.optim.against_formula import (
    BF16,
    EPS,
    gradients,
    parameter,
    train,
)

STEPS = 50
OPTIONS = [
    {"amsgrad": amsgrad, "decoupled_weight_decay": decoupled, "maximize": maximize, "weight_decay": decay}
    for amsgrad, (decoupled, decay), maximize in itertools.product(
        (False, True), ((False, 0.0), (False, 0.1), (True, 0.1)), (False, True)
    )
]


def fp32_bound(lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart in `STEPS` steps while their gradients are the same.

    Per step and implementation: the weight is rounded twice at most. The update lr · m̂ / √v̂: where v̂ averages g²
    evenly, |g| <= √t · √v̂ <= 7.1 √v̂ for t <= 50. m̂ sums four roundings a step (one is the decay's) of terms up to
    max|g|, ten steps deep for β1 = 0.9: 40 · 7.1; v̂ four a step over 50 steps, halved by the root, times |m̂| / √v̂:
    100 · 7.1. Together below 1000 half ulps of lr; 2048 for two implementations, with the few of the final formula.
    """
    return STEPS * EPS * (4 * largest + 2048 * lr)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("lr", "betas"), [(1e-2, (0.9, 0.999)), (torch.tensor(3e-3), (0.8, 0.95)), (1e-2, (0.0, 0.0))], ids=str
)
def test_fp32_parameters_get_torchs_adam(options, lr, betas):
    ours, theirs = parameter(), parameter()
    mine = Adam([ours], lr=lr, betas=betas, **options)
    reference = torch.optim.Adam([theirs], lr=lr, betas=betas, **options)
    for optimizer in (mine, reference):
        train(optimizer, gradients(STEPS))
    bound = fp32_bound(float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show
    assert set(mine.state[ours]) == set(reference.state[theirs])
    for name, value in reference.state[theirs].items():
        # Four roundings a step and implementation, of terms up to max g² < 25.
        assert (mine.state[ours][name] - value).abs().max() <= 2 * 4 * STEPS * EPS * 25, name


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_with_decoupled_decay_it_is_adamw(rounding):
    ours, theirs = parameter(BF16), parameter(BF16)
    for cls, param, options in ((Adam, ours, {"decoupled_weight_decay": True}), (AdamW, theirs, {})):
        train(cls([param], lr=1e-2, weight_decay=0.1, rounding=rounding, **options), gradients(10, BF16))
    assert torch.equal(ours, theirs)
