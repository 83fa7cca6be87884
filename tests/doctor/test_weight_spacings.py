"""The histogram of spacings, against the neighbors of each BF16 number, found by counting its bit pattern."""

import torch

from hf_lowprec.rounding.nearest import spacings_by_exponent
from hf_lowprec.tools.prediction import count_spacings, magnitudes

SPACINGS = spacings_by_exponent(torch.bfloat16)


def finite_numbers() -> torch.Tensor:
    """Every finite BF16 number."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return every[every.isfinite()]


def neighbor(numbers: torch.Tensor, direction: int) -> torch.Tensor:
    """The next number of larger (1) or smaller (-1) magnitude."""
    pattern = numbers.view(torch.int16).int() & 0x7FFF
    return (pattern + direction).clamp(min=0).to(torch.int16).view(torch.bfloat16).double()


def test_spacings_are_the_distances_to_both_neighbors():
    numbers = finite_numbers()
    numbers = numbers[numbers.abs() < torch.finfo(torch.bfloat16).max]  # its larger neighbor is infinite
    above = neighbor(numbers, 1) - numbers.abs().double()
    below = torch.where(numbers == 0, above, numbers.abs().double() - neighbor(numbers, -1))
    expected = {
        spacing: float((above == spacing).sum() + (below == spacing).sum()) / 2
        for spacing in torch.cat((above, below)).unique().tolist()
    }
    counts, found = count_spacings(numbers), {}
    for spacing, count in zip(SPACINGS.tolist(), counts.tolist(), strict=True):  # two exponents share the smallest
        found[spacing] = found.get(spacing, 0) + count
    assert {spacing: count for spacing, count in found.items() if count} == expected


def test_ones_count_half_for_each_side():
    counts = count_spacings(torch.ones(10))
    assert {float(SPACINGS[k]): float(counts[k]) for k in counts.nonzero().flatten()} == {2**-7: 5, 2**-8: 5}


def test_tensors_are_rounded_to_bf16_and_read_in_chunks(monkeypatch):
    weights = torch.randn(50, 21)
    whole = count_spacings(weights)
    assert torch.equal(whole, count_spacings(weights.bfloat16()))
    monkeypatch.setattr("hf_lowprec.tools.prediction.CHUNK", 64)
    assert torch.equal(whole, count_spacings(weights))
    assert whole.sum() == weights.numel()


def test_numbers_that_are_not_finite_are_left_out():
    assert count_spacings(torch.tensor([float("inf"), float("nan"), -float("inf"), 1.5])).sum() == 1
    assert count_spacings(torch.empty(0)).sum() == 0


def test_magnitudes_are_those_of_uniform_numbers():
    numbers = 1 + (torch.arange(10**5, dtype=torch.float64) + 0.5) / 10**5
    torch.testing.assert_close(magnitudes()[127], numbers.square().mean().sqrt())
