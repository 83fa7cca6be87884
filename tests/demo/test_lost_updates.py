"""The share of lost updates, against the optimizer's own figure and for optimizers that lose all or nothing."""

import math

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.demo.lost_updates import LostUpdates
from hf_lowprec.optim.lost_updates import lost_updates


@pytest.mark.parametrize("rounding", ["kahan", "stochastic", "nearest"])
def test_lost_updates_agree_with_the_optimizers_own_account(rounding: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 32).bfloat16())
    optimizer = hf_lowprec.AdamW([weight], lr=1e-3, rounding=rounding)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        measured, own = LostUpdates(), lost_updates(optimizer)
        measured.before_step(optimizer)
        optimizer.step()
        measured.after_step(optimizer)
        assert measured.share == pytest.approx(own, abs=1e-5)


def test_lost_updates_of_a_stalled_and_of_an_exact_optimizer() -> None:
    shares = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.ones(256, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-5)
        measured = LostUpdates()
        assert math.isnan(measured.share)
        weight.grad = torch.ones_like(weight)
        measured.before_step(optimizer)
        optimizer.step()
        measured.after_step(optimizer)
        shares.append(measured.share)
    assert shares[0] == 1
    assert abs(shares[1]) < 0.01
