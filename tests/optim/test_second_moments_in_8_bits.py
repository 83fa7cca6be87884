"""No step grows because a second moment in 8 bits was lost, however far apart the elements of a block are."""

import math

import pytest
import torch

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.state.states import stored_as, value_in
from tests.support.optim.gradient_dtypes import allow_gradients_in

FP32, INT8 = torch.float32, torch.int8
LR, BETAS, EPS = 1e-3, (0.9, 0.99), 1e-30
ROUNDED = 1 + 2.0**-20
"""The factor by which roundings of FP32 arithmetic may change the ratio of two steps."""
SCALES = 2.0 ** -torch.cat([torch.arange(31.0), torch.tensor([50.0])])
"""Of the gradients of a block's elements. The second moments of the last eleven lie below the window of 40 octaves."""


def gradient(step: int, case: str) -> torch.Tensor:
    """32 blocks, in which every element has each place once."""
    scales = torch.stack([SCALES.roll(k) for k in range(32)])
    if case == "noise":
        return scales * torch.randn(scales.shape, generator=torch.Generator().manual_seed(step))
    return scales * (2.0**-7 if case == "a drop" and step > 60 else 1.0)


def adamw(second_moment: torch.dtype) -> tuple[torch.nn.Parameter, AdamW]:
    param = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16))
    allow_gradients_in(FP32, [param])
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    return param, AdamW([param], state_dtype={"exp_avg": FP32, "exp_avg_sq": second_moment}, **options)


def next_step(before: dict[str, torch.Tensor], grad: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The length of AdamW's step in FP64, in learning rates, and its second moment."""
    first = BETAS[0] * before["exp_avg"].double() + (1 - BETAS[0]) * grad.double()
    second = BETAS[1] * before["exp_avg_sq"].double() + (1 - BETAS[1]) * grad.double().square()
    root = (second / (1 - BETAS[1] ** step)).sqrt()
    return first.abs() / (1 - BETAS[0] ** step) / (root + EPS), second


@pytest.mark.parametrize("case", ["constant", "noise", "a drop"])
def test_storing_a_second_moment_lengthens_the_next_step_by_less_than_a_code(case):
    """The next step from what was stored, compared with the one from the moment before it was stored.

    A moment loses at most the distance to the code below: a quarter of that code where codes have 2 mantissa bits, an
    eighth where they have 3. So a step grows by √(5/4) or √(9/8) at most. Moments below the window are raised, which
    makes steps shorter.
    """
    param, optimizer = adamw(INT8)
    before = {"exp_avg": torch.zeros(32, 32), "exp_avg_sq": torch.zeros(32, 32)}
    longest = 0.0
    for step in range(1, 121):
        param.grad = gradient(step, case)
        _, exact = next_step(before, param.grad, step)
        optimizer.step()
        stored = {name: value_in(optimizer.state[param], name) for name in before}
        assert (stored["exp_avg_sq"] > 0).all()
        found, expected = (
            next_step({**stored, **moment}, gradient(step + 1, case), step + 1)[0]
            for moment in ({}, {"exp_avg_sq": exact})
        )
        growth, octaves = found / expected, torch.log2(exact.amax(1, keepdim=True) / exact)
        assert (growth <= math.sqrt(5 / 4) * ROUNDED).all()
        assert (growth <= math.sqrt(9 / 8) * ROUNDED)[octaves < 22].all()  # the upper 24, of which two may be empty
        assert (growth <= ROUNDED)[octaves > 41].all()
        longest = max(longest, growth.max().item())
        before = stored
    assert longest > 1.05  # moments are rounded down as well


@pytest.mark.parametrize(
    ("ratio", "slowest", "fastest"), [(1e6, 0.64, 0.91), (1e7, 0.064, 0.091), (1e8, 0.0064, 0.0091)]
)
def test_steps_beside_an_outlier_are_too_short(ratio, slowest, fastest):
    """Where one gradient is larger than its neighbours by `ratio`: √(exact moment / stored moment) of these.

    The smallest number is 5/4 · 2⁻³⁹ of the octave of the largest. The numbers are those of the docs.
    """
    ratios = ratio * 2.0 ** (torch.arange(256) / 512)  # their squares fill an octave
    exact = torch.cat([ratios.square()[:, None], torch.ones(256, 31)], dim=1)
    stored = value_in(stored_as(exact, INT8, "exp_avg_sq"), "exp_avg_sq")
    rates = stored[:, 1:].rsqrt() * (ratios[:, None] / ratio)
    assert rates.min().item() == pytest.approx(slowest, rel=0.01)
    assert rates.max().item() == pytest.approx(fastest, rel=0.01)
