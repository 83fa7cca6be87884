"""Split weights: the master survives, and the stored weight is its nearest BF16 number, ties away from zero.

References are Python integers and FP64.
"""

import math

import pytest
import torch

from hf_lowprec.rounding import join, round_nearest, split
from tests.support.rounding.fp32_patterns import floats

BF16, FP32, INT16, INT32 = torch.bfloat16, torch.float32, torch.int16, torch.int32
UPPER = torch.arange(1 << 16, dtype=torch.int64)
# Lower halves of patterns: zero, the smallest, both sides of the tie and the tie itself, the largest, and some others.
LOWER = [0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF, 0x1234, 0x9E37, 0xDEAD]
LARGEST = torch.finfo(FP32).max


def stored(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair in its storage dtypes, BF16 and int16; storing loses nothing."""
    weight, remainder = split(master)
    assert torch.equal(weight.to(BF16).float().nan_to_num(), weight.nan_to_num())
    assert torch.equal(remainder.to(INT16).int(), remainder)
    return weight.to(BF16), remainder.to(INT16)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    return join(weight.float(), remainder.int())


@pytest.mark.parametrize("lower", LOWER, ids=hex)
def test_every_upper_half_with_these_lower_halves_survives(lower):
    pattern = (UPPER << 16) + lower
    master = floats(pattern)
    weight, remainder = stored(master)
    found, nan = joined(weight, remainder), master.isnan()
    assert torch.equal(found[~nan].view(INT32), master[~nan].view(INT32))
    assert found[nan].isnan().all()
    assert weight[nan].isnan().all()
    assert not weight[~nan].isnan().any()


@pytest.mark.parametrize("lower", LOWER, ids=hex)
def test_the_weight_is_the_nearest_and_ties_go_away_from_zero(lower):
    """The neighbours are the multiples of 65536 around the pattern; distances are exact in FP64."""
    pattern = (UPPER << 16) + lower
    pattern = pattern[(pattern & 0x7FFFFFFF) < 0x7F7F0000]  # both neighbours are finite
    master, inner, outer = (floats(p).double() for p in (pattern, pattern & ~0xFFFF, (pattern & ~0xFFFF) + 0x10000))
    expected = torch.where((master - inner).abs() < (outer - master).abs(), inner, outer)
    weight, _ = stored(floats(pattern))
    assert torch.equal(weight.double(), expected)
    assert torch.equal(weight.double().signbit(), expected.signbit())
    nearest = round_nearest(floats(pattern)).double()
    if lower != 0x8000:
        assert torch.equal(nearest, expected)
    assert ((weight.double() - master).abs() == (nearest - master).abs()).all()  # ties are equally far


SPECIAL = [(0.0, 0.0, 0), (1 + 2.0**-8, 1 + 2.0**-7, -32768), (1 + 2.0**-8 - 2.0**-23, 1.0, 32767), (2.0**-149, 0.0, 1)]
SPECIAL += [(2.0**-134, 2.0**-133, -32768), (math.inf, math.inf, 0), (LARGEST, math.inf, -1), (math.nan, math.nan, 0)]
"""Zero, a tie, one below a tie, subnormal numbers, what is not finite, and the largest number."""


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("master", "weight", "remainder"), SPECIAL)
def test_special_values(master, weight, remainder, sign):
    values = sign * torch.tensor([master], dtype=FP32)
    got, rest = stored(values)
    expected = sign * torch.tensor([weight], dtype=BF16)
    assert got.isnan().all() if math.isnan(weight) else torch.equal(got.view(INT16), expected.view(INT16))
    assert rest.item() == remainder
    again = joined(got, rest)
    assert again.isnan().all() if math.isnan(master) else torch.equal(again.view(INT32), values.view(INT32))


REMAINDERS = torch.arange(-32768, 32768, dtype=INT16)


@pytest.mark.parametrize("weight", [0.0, -0.0, math.inf, -math.inf])
def test_a_remainder_that_was_left_beside_a_new_weight_makes_no_nan(weight):
    """Pruning sets weights to zero and knows no remainders."""
    weights = torch.full((1 << 16,), weight, dtype=BF16)
    found = joined(weights, REMAINDERS)
    assert not found.isnan().any()
    wrong = REMAINDERS < 0 if weight == 0 else REMAINDERS > 0
    assert torch.equal(found[wrong].view(INT32), weights.float()[wrong].view(INT32))
    assert found[REMAINDERS == 0].unique().tolist() == [weight]


@pytest.mark.parametrize("weight", [1.0, -1.5, 2.0**-133, 3.0e38, 2.0**-126])
def test_a_left_remainder_is_at_most_half_a_spacing(weight):
    weights = torch.full((1 << 16,), weight, dtype=BF16)
    found = joined(weights, REMAINDERS).double()
    pattern = weights[:1].view(INT16)
    above = ((pattern + 1).view(BF16).double() - weights[:1].double()).abs()
    assert ((found - weights.double()).abs() <= above / 2).all()


def test_a_nan_as_weight_is_a_nan_with_every_remainder():
    for pattern in (0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF):
        weight = torch.full((1 << 16,), pattern - (1 << 16) * (pattern > 0x7FFF), dtype=torch.int16).view(BF16)
        found = joined(weight, REMAINDERS)
        assert found.isnan().all()
        assert stored(found)[0].isnan().all()
