"""Dithers and low bits that are added to a 16-bit weight; every pattern of both dtypes, against integers and FP64."""

import pytest
import torch

from hf_lowprec.rounding import round_nearest
from hf_lowprec.rounding.random_bits import as_compensation, dither

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16]
SMALLEST_NORMAL_FP16 = 2.0**-14
"""Smaller FP16 weights get no dither."""


def all_weights(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 patterns, also infinities and NaN."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def dithered(dtype: torch.dtype) -> torch.Tensor:
    """All weights that get a dither. (Around the smallest normal FP16 weight, FP32 is spaced more finely below it than
    FP16; its dither is half as wide there as it could be.)"""
    weights = all_weights(dtype)
    weights = weights[weights.isfinite() & (weights != 0)]
    return weights[weights.abs() > SMALLEST_NORMAL_FP16] if dtype is FP16 else weights


def halves(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the distances to the neighbours of smaller and of larger magnitude, FP64. The largest weight is followed by
    the power of two that the dtype would reach if it had one more exponent."""
    pattern = weights.view(torch.int16).to(torch.int32) & 0x7FFF
    bits = 8 if weights.dtype is BF16 else 11
    smallest = 2.0**-133 if weights.dtype is BF16 else 2.0**-24
    magnitude = weights.double().abs()
    above = torch.exp2(torch.frexp(magnitude)[1].double() - bits).clamp(min=smallest)
    below = magnitude - (pattern - 1).to(torch.int16).view(weights.dtype).double()
    return below / 2, above / 2


def fp64_dither(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Outwards (away from zero), relative to the weight, FP64."""
    return dither(weights, torch.full(weights.shape, bits, dtype=torch.int32)).double() * weights.double().sign()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 1, 7, 8, 0x5A5A, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])
def test_every_weight_still_rounds_to_itself(dtype, bits):
    """Without and with the rounding of the dither to BF16; the sum is exact in FP64, and in FP32 before rounding."""
    weights = all_weights(dtype)
    value = dither(weights, torch.full(weights.shape, bits, dtype=torch.int32))
    for added in (value, as_compensation(weights, value)):
        total = weights.float() + added.float()
        finite = weights.isfinite()
        assert added[finite].isfinite().all()
        assert torch.equal(round_nearest(total, dtype)[finite], weights.float()[finite])
        assert torch.equal(total[finite].double(), (weights.double() + added.double())[finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_get_a_compensation_of_zero(dtype):
    weights = all_weights(dtype)
    weights = weights[~weights.isfinite()]
    for bits in (0, 0x8000, 0xFFFF):
        value = dither(weights, torch.full(weights.shape, bits, dtype=torch.int32))
        assert not as_compensation(weights, value).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_no_dither_and_neither_have_subnormal_fp16_weights(dtype):
    weights = all_weights(dtype)
    weights = weights[weights.abs() < (SMALLEST_NORMAL_FP16 if dtype is FP16 else 2.0**-133)]
    assert len(weights) == (2 if dtype is BF16 else 2 * 1024)
    assert not any(fp64_dither(weights, bits).any() for bits in (0, 0x4321, 0xFFFF))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_uniform_over_either_half_of_the_interval(dtype):
    """The values of all bits: midpoints of equal parts between both halfway points, as many on either side."""
    samples = dithered(dtype)[::2003]
    powers = dithered(dtype)
    powers = powers[(powers.view(torch.int16) & (0x7F if dtype is BF16 else 0x3FF)) == 0][::9]
    for weight in torch.cat([samples, powers, dithered(dtype)[[0, -1]]]):
        below, above = (half.item() for half in halves(weight[None]))
        bits = torch.arange(1 << 16, dtype=torch.int32)
        found = dither(weight.expand(1 << 16), bits).double() * weight.double().sign()
        distinct, counts = found.unique(return_counts=True)
        parts = len(distinct) // 2
        assert parts == (1 << 14 if dtype is BF16 else 1 << 11)
        assert (counts == (1 << 16) // len(distinct)).all()
        midpoints = (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
        assert torch.equal(distinct, torch.cat([-below * midpoints.flip(0), above * midpoints]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_reaches_up_to_halfway_to_both_neighbours(dtype):
    """Bits of zero and of 65,535 are half a part away from there; on the side of a smaller power of two, it is half as
    far as on the other one."""
    weights = dithered(dtype)
    below, above = halves(weights)
    part = 2.0**-15 if dtype is BF16 else 2.0**-12
    assert torch.equal(fp64_dither(weights, 0), -below * (1 - part))
    assert torch.equal(fp64_dither(weights, 0xFFFF), above * (1 - part))
    mantissa = 0x7F if dtype is BF16 else 0x3FF
    powers = ((weights.view(torch.int16) & mantissa) == 0) & (weights.abs() > torch.finfo(dtype).smallest_normal)
    assert torch.equal(above[powers], 2 * below[powers])
    assert torch.equal(above[~powers], below[~powers])


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_bits_of_every_kind(dtype):
    """Of FP32 values all over the interval, ties included: off by a BF16 spacing at most; on even weights, by half."""
    weights = dithered(dtype)
    weights = weights[weights.abs() >= 2.0**-100]  # where FP32 has the bits below
    below, above = halves(weights)
    even = (weights.view(torch.int16) & 1) == 0
    for share in (
        -1.0,
        -1 + 2.0**-7,
        -1 + 2.0**-15,
        -0.7,
        -0.1,
        -(2.0**-9),
        0.0,
        2.0**-9,
        0.3,
        0.99,
        1 - 2.0**-15,
        1.0,
    ):
        inside = torch.where(even, torch.ones(()).double(), 1 - 2.0**-12)  # ties go to even weights
        outwards = (below if share < 0 else above) * share * inside
        exact = (weights.double() + outwards * weights.double().sign()).float()
        low_bits = exact - weights.float()
        assert torch.equal(round_nearest(exact, dtype), weights.float())
        kept = as_compensation(weights, low_bits)
        error = (kept.double() - low_bits.double()).abs()
        spacing = torch.exp2(torch.frexp(low_bits.double().abs())[1].double() - 8)
        assert (error <= torch.where(even, spacing / 2, spacing)).all()
        # The whole of weight + low bits: 2**-16 of the weight at most, half of that on even weights.
        assert (error <= 2.0**-16 * weights.double().abs()).all()
        assert torch.equal(round_nearest(weights.float() + kept.float(), dtype), weights.float())
        if share in (-1.0, 1.0):
            assert torch.equal(kept.double()[even], low_bits.double()[even])  # the tie itself


def test_a_tie_above_an_odd_weight_is_truncated():
    """1 + 2**-7 is odd; what lies just below the tie would become the tie, which rounds to the neighbour."""
    odd, even = torch.tensor([1 + 2.0**-7]).to(BF16), torch.tensor([1.0]).to(BF16)
    below_tie = torch.tensor([2.0**-8 * (1 - 2.0**-12)])
    assert as_compensation(odd, below_tie).item() == 2.0**-8 * (1 - 2.0**-8)
    assert as_compensation(even, below_tie).item() == 2.0**-8
    assert as_compensation(odd, -below_tie).item() == -(2.0**-8) * (1 - 2.0**-8)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_low_bits_that_are_not_finite_become_zero(value):
    for weight in (1.0, 1 + 2.0**-7):
        assert as_compensation(torch.tensor([weight]).to(BF16), torch.tensor([value])).item() == 0
