"""The sums and the numbers that they amount to, on cases whose answer is known."""

import math

import pytest
import torch

from hf_lowprec.monitor.step_precision import (
    COLUMN,
    SUMS,
    precision_values,
    second_moment_sums,
    slope_sums,
)
from hf_lowprec.rounding import round_stochastic
from hf_lowprec.rounding.nearest import spacing

ONE = torch.ones(1, dtype=torch.float64)


def lost(sums: torch.Tensor, prefix: str = "update") -> tuple[float, float]:
    table = torch.zeros(1, len(SUMS), dtype=torch.float64)
    first = COLUMN[f"{prefix}_square"]
    table[:, first : first + 4] = sums
    name = {"update": "lost_updates", "second_moment": "lost_second_moment"}[prefix]
    (values,) = precision_values(table)
    return values[name], values[f"{name}_error"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spacing_is_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 0.02, 3e4, 6.2e-5, 2.0**-14, 1e-6, -0.7]).to(dtype)
    bits = values.abs().view(torch.int16)
    following = (bits + 1).view(dtype)
    assert torch.equal(spacing(values, dtype), following.double() - values.abs().double())


def test_no_change_is_no_number():
    zeros = torch.zeros(1, 8, dtype=torch.float64)
    table = torch.zeros(1, len(SUMS), dtype=torch.float64)
    table[:, COLUMN["update_square"] : COLUMN["update_square"] + 4] = slope_sums(zeros, zeros, None, ONE)
    assert precision_values(table) == [{}]


@pytest.mark.parametrize("ulps", [0.01, 0.3, 5.0])
def test_the_error_bar_of_stochastic_rounding_covers_what_it_says(ulps):
    """Of 400 seeds, 68.3% are within one standard error, with a standard deviation of 2.3%; 95.4% ± 1.0% within two."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(400, 1000, generator=generator) + 1).bfloat16().float()
    update = torch.randn(400, 1000, generator=generator) * 2.0**-7 * ulps
    exact = (weight + update).double() - weight.double()
    bits = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32)
    stored = round_stochastic(weight + update, bits).double() - weight.double()
    results = [
        lost(slope_sums(exact[k : k + 1], stored[k : k + 1], spacing(weight[k : k + 1], torch.bfloat16), ONE))
        for k in range(400)
    ]
    scores = torch.tensor([share / error for share, error in results])
    assert abs(scores.mean()) < 4 / math.sqrt(400)
    # The larger of two estimates of the same error makes it larger by a few percent.
    assert 0.683 - 0.07 < (scores.abs() < 1).double().mean() < 0.9
    assert (scores.abs() < 2).double().mean() > 0.954 - 0.04


def test_elements_that_stand_for_many_make_the_error_no_smaller():
    update, noise = torch.rand(1, 100, dtype=torch.float64), torch.randn(1, 100, dtype=torch.float64)
    grid = torch.ones_like(update)
    one, many = (lost(slope_sums(update, update + noise, grid, weights)) for weights in (ONE, 50 * ONE))
    assert many == pytest.approx(one)


def test_a_sample_in_which_nothing_moves_is_no_proof_of_loss():
    """An expectation of 0.1 moves: that none is seen says nothing, and the error must say so."""
    weight = torch.ones(1, 100, dtype=torch.float64)
    update = torch.full_like(weight, 2.0**-7 / 1000)
    share, error = lost(slope_sums(update, torch.zeros_like(update), spacing(weight, torch.bfloat16), ONE))
    assert share == 1
    assert error == pytest.approx(math.sqrt(1000 / 100), rel=0.01)  # √(spacing·Σ|u|³)/Σu²


def test_second_moments_that_grow_or_are_zero_do_not_count():
    before = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    exact = torch.tensor([[0.9, 2.0, 1.0]], dtype=torch.float64)
    stored = torch.tensor([[0.95, 7.0, 9.0]], dtype=torch.float64)
    share, _ = lost(second_moment_sums(before, exact, stored, None, ONE), "second_moment")
    assert share == pytest.approx(0.5)
