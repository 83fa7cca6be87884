"""The papers' toys: what their emulations round, how many steps stochastic rounding takes, and schedules of rates."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("scipy")

from benchmarks.evidence.experiments import arrival, halting
from benchmarks.evidence.harness import Workspace
from hf_lowprec.optim import SGD

LOW = 2.0**-12


@pytest.mark.parametrize(
    ("mode", "weight", "target", "expected"),
    [
        ("fp32", 1 + LOW, 0.0, [1 + LOW, 3 + 3 * LOW]),
        ("updates", 1 + LOW, 0.0, [1 + LOW, 3 + 3 * LOW]),
        ("compute", 1 + LOW, 0.0, [1.0, 3.0]),
        ("compute", 1 + LOW, 1.0, [LOW, 3 * LOW]),  # the residual is small, and so is its error
        ("outputs", 1 + LOW, 1.0, [0.0, 0.0]),
        ("compute", 1 + 2.0**-8 + LOW, 0.0, [1 + 2.0**-7, 3.03125]),  # rounded twice; once, it would be 3.015625
        ("split", 1 + 2.0**-7, 0.0, [1 + 2.0**-7, 3.03125]),
    ],
)
def test_a_mode_rounds_forward_and_backward_as_it_says(mode, weight, target, expected):
    weights = torch.tensor([[weight, 0.0]], dtype=torch.bfloat16 if mode == "split" else torch.float32)
    found = halting.gradients(mode, weights, torch.tensor([[1.0, 3.0]]), torch.tensor([target]))
    assert found.dtype == weights.dtype
    assert found.tolist() == [expected]


def test_rounded_updates_stop_at_theorem_1_and_a_rounded_forward_and_backward_does_not(tmp_path):
    settings, work = halting.Settings(problems=8, steps=3000), Workspace(tmp_path, print, None)
    distances = {mode: halting.run(f"{mode}-0.1", settings, work)["distances"] for mode in ("updates", "compute")}
    assert min(distances["updates"]) >= halting.bound(0.1) > 10 * max(distances["compute"])


def test_steps_for_one_spacing_have_the_paper_s_distribution():
    """Of 100,000 weights; five standard errors of a binomial share are exceeded in one of a million cases."""
    last, count = 1 / 4, 100_000
    weights = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    found = arrival.arrivals(
        SGD([weights], rounding="stochastic"), weights, 1 + 2.0**-7, lambda step: 2.0**-7 * (0.5 if step < 2 else last)
    )
    shares = [0.5, 0.25, *(0.25 * (1 - last) ** (n - 3) * last for n in range(3, 12))]
    for steps, share in enumerate(shares, 1):
        assert int((found == steps).sum()) / count == pytest.approx(share, abs=5 * math.sqrt(share / count))


@pytest.mark.parametrize("shape", arrival.SHAPES)
def test_a_schedule_is_as_long_as_fp32_s_steps_need_it_to_be(shape):
    steps = arrival.length(shape, 1e-3)
    rate, shorter = (arrival.decay(shape, 1e-3, 1e-5, each) for each in (steps, steps - 1))
    assert sum(map(shorter, range(4600))) < 1 <= sum(map(rate, range(4600)))
    assert rate(0) == 1e-3 and rate(steps) == rate(10**6) == pytest.approx(1e-5, rel=1e-12)
    rates = [rate(step) for step in range(steps)]
    assert rates == sorted(rates, reverse=True)


def test_fp32_goes_from_2_to_3_in_the_paper_s_steps(tmp_path):
    """The 4600 sums of FP32 numbers between 2 and 4 are each off by 2⁻²³ or less: 55 updates of 1e-5 in all."""
    found = arrival.run("cosine 0.0003 1e-05 fp32", arrival.Settings(runs=2), Workspace(tmp_path, print, None))
    assert found["mean"] == pytest.approx(4600, abs=55)
