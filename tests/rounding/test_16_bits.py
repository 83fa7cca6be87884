"""Rounding to 16 bits: to nearest, stochastically, with Kahan's compensation, and split; and the square root.

References are IEEE 754's definitions, integers, and FP64, in which every sum below is exact: of the distances to both
neighbours the smaller counts, and the parity of the pattern in ties.
"""

import math

import numpy as np
import pytest
import torch

from hf_lowprec.rounding import join, kahan_add, round_nearest, round_stochastic, split, sqrt_rn
from tests.support.rounding.fp32_patterns import INF, NANS, floats, patterns

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL_PATTERNS = 1 << 16
# Lower 16 bits of FP32 patterns: zero, the smallest, around quarters and the tie, the largest; and four arbitrary ones.
FRACTIONS = [0, 1, 2, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF]
FRACTIONS += [0x1234, 0x5A5A, 0x9E37, 0xDEAD]


def magnitudes(pattern: torch.Tensor) -> torch.Tensor:
    """FP64 magnitudes of FP32 patterns; infinity counts as 2**128, the next power of two."""
    magnitude = floats(pattern & 0x7FFFFFFF).double()
    return torch.where(magnitude.isinf(), torch.full_like(magnitude, 2.0**128), magnitude)


def nearest_bf16(pattern: torch.Tensor) -> torch.Tensor:
    """The pattern of the nearest BF16 value, ties to the even one, for FP32 patterns that are not NaN."""
    lower = pattern & 0xFFFF0000
    upper = torch.where(pattern & 0x7FFFFFFF == INF, lower, lower + 0x10000)
    value = magnitudes(pattern)
    below, above = value - magnitudes(lower), magnitudes(upper) - value
    is_odd = (lower >> 16) % 2 == 1
    return torch.where((above < below) | ((above == below) & is_odd), upper, lower)


@pytest.mark.parametrize("fraction", FRACTIONS, ids=hex)
def test_every_bf16_pattern_with_these_lower_bits(fraction):
    pattern = torch.arange(ALL_PATTERNS) * 0x10000 + fraction
    value = floats(pattern)
    nan = value.isnan()
    rounded = round_nearest(value)
    assert rounded.dtype is FP32
    assert torch.equal(rounded.isnan(), nan)
    expected = nearest_bf16(pattern[~nan])
    assert torch.equal(patterns(rounded[~nan]), expected)
    # Torch's own cast, bit for bit: the sign of zero counts.
    assert torch.equal(patterns(value.to(BF16).float()[~nan]), expected)


def test_every_fraction_of_some_binades():
    """All 65,536 fractions above even and odd patterns, both signs, ends of binades, subnormals, the largest finite."""
    tops = torch.tensor(
        [0x3F80, 0x3F81, 0x3FFF, 0xBF80, 0xBFFF, 0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x7F7E, 0x7F7F]
    )
    pattern = (tops[:, None] * 0x10000 + torch.arange(ALL_PATTERNS)).flatten()
    assert torch.equal(patterns(round_nearest(floats(pattern))), nearest_bf16(pattern))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nan_of_any_payload_stays_nan_in_storage(dtype):
    value = floats(torch.tensor(NANS))
    assert round_nearest(value, dtype).isnan().all()
    assert round_nearest(value, dtype).to(dtype).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "largest", "half_ulp"), [(BF16, 0x7F7F0000, 0x8000), (FP16, 0x477FE000, 0x1000)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_overflow_begins_half_an_ulp_above_the_largest_finite(dtype, largest, half_ulp, sign):
    # The largest finite pattern is odd in both formats, so the tie goes to the even one: infinity.
    pattern = torch.tensor([largest, largest + half_ulp - 1, largest + half_ulp, 0x7F7FFFFF, INF]) + sign
    rounded = round_nearest(floats(pattern), dtype)
    assert patterns(rounded).tolist() == [largest + sign, largest + sign, *[INF + sign] * 3]


def fp16_magnitudes(pattern: np.ndarray) -> np.ndarray:
    """FP64 magnitudes of FP16 patterns in [0, 0x7C00] from their fields, the last counted as 2**16."""
    exponent, mantissa = pattern >> 10, pattern & 0x3FF
    normal = np.ldexp(1024.0 + mantissa, exponent - 25)
    return np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -24), normal)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_fp16_pattern_and_the_midpoints_around_it(sign):
    pattern = np.arange(0x7C00)  # all finite magnitudes
    lower, upper = fp16_magnitudes(pattern), fp16_magnitudes(pattern + 1)
    middle = ((lower + upper) / 2).astype(np.float32)
    assert np.array_equal(
        middle.astype(np.float64), (lower + upper) / 2
    )  # the test's own premise: FP32 holds every tie
    to_storage = np.where(upper == 65536.0, np.inf, upper)
    cases = {
        "itself": (lower.astype(np.float32), lower),
        "one FP32 ulp below the tie": (np.nextafter(middle, np.float32(0)), lower),
        "the tie": (middle, np.where(pattern % 2 == 0, lower, to_storage)),
        "one FP32 ulp above the tie": (np.nextafter(middle, np.float32(np.inf)), to_storage),
        "one FP32 ulp above": (np.nextafter(lower.astype(np.float32), np.float32(np.inf)), lower),
        "one FP32 ulp below the next": (np.nextafter(upper.astype(np.float32), np.float32(0)), to_storage),
    }
    for name, (value, expected) in cases.items():
        rounded = round_nearest(torch.from_numpy(value) * sign, FP16)
        wanted = torch.from_numpy(expected.astype(np.float32)) * sign
        assert torch.equal(patterns(rounded), patterns(wanted)), name
        assert torch.equal(patterns((torch.from_numpy(value) * sign).to(FP16).float()), patterns(wanted)), name


def test_fp16_of_fp32_subnormals_and_other_tiny_values_is_a_signed_zero():
    tiny = torch.tensor([1, 0x007FFFFF, 0x00800000, 0x33000000])  # the last is 2**-25, the tie between 0 and 2**-24
    for sign in (0, 0x80000000):
        assert patterns(round_nearest(floats(tiny + sign), FP16)).tolist() == [sign] * len(tiny)


def test_fp32_is_returned_as_it_is():
    value = floats(torch.arange(0, 2**32, 65537 * 3))
    assert torch.equal(patterns(round_nearest(value, FP32)), patterns(value))


def exact_sqrt(value: float) -> float:
    """The FP32 value nearest to the root of a positive FP32 value, in integers; a root of 24 bits is never a tie."""
    mantissa, exponent = math.frexp(value)
    integer, exponent = int(math.ldexp(mantissa, 24)), exponent - 24
    if exponent % 2:
        integer, exponent = integer * 2, exponent - 1
    root = math.isqrt(integer << 80)  # 52 or more bits of the root; `sticky` stands for the rest
    sticky = root * root != integer << 80
    drop = root.bit_length() - 24
    kept, rest, half = root >> drop, root & ((1 << drop) - 1), 1 << (drop - 1)
    assert sticky or rest != half
    kept += rest >= half
    return math.ldexp(float(kept), drop + (exponent - 80) // 2)


def test_sqrt_is_correctly_rounded():
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randint(1, INF, (20_000,), generator=generator)  # log-uniform over all positive finite values
    binade = 0x3F000000 + torch.randint(0, 1 << 24, (10_000,), generator=generator)  # [0.5, 2)
    edges = torch.tensor([1, 2, 3, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF])
    value = floats(torch.cat([anywhere, binade, edges]))
    expected = torch.tensor([exact_sqrt(v) for v in value.tolist()], dtype=torch.float64)
    assert torch.equal(sqrt_rn(value).double(), expected)


def test_sqrt_of_special_values():
    root = sqrt_rn(torch.tensor([0.0, -0.0, math.inf, -1.0, math.nan, -math.inf]))
    assert patterns(root[:3]).tolist() == [0, 0x80000000, INF]
    assert root[3:].isnan().all()


WORDS = ALL_PATTERNS
ALL_WORDS = torch.arange(WORDS, dtype=torch.int32)
# Upper halves: ones, ends of binades, both signs, zeros, subnormals, the smallest normal, the largest finite values.
TOPS = [0x3F80, 0x3F81, 0x3FFF, 0xBF80, 0xBFFF, 0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x4234, 0xC9AB]
TOPS += [0x7F7E, 0x7F7F, 0xFF7E, 0xFF7F]


def one(pattern: int) -> torch.Tensor:
    return floats(torch.tensor([pattern]))


@pytest.mark.parametrize("top", TOPS, ids=hex)
def test_exactly_the_fraction_of_all_words_rounds_away(top):
    for fraction in FRACTIONS:
        rounded = patterns(round_stochastic(one(top * WORDS + fraction).expand(WORDS), ALL_WORDS))
        away = rounded == (top + 1) * WORDS
        assert torch.equal(rounded[~away], torch.full_like(rounded[~away], top * WORDS)), hex(fraction)
        assert away.sum().item() == fraction


@pytest.mark.parametrize("fraction", FRACTIONS, ids=hex)
def test_every_bf16_pattern_adds_the_word_and_truncates(fraction):
    """With words around the one that carries; values that BF16 represents, infinities and NaN never change."""
    pattern = torch.arange(WORDS) * WORDS + fraction
    value = floats(pattern)
    finite = value.isfinite()
    for word in {0, 0xFFFF, max(0xFFFF - fraction, 0), min(WORDS - fraction, 0xFFFF)}:
        rounded = round_stochastic(value, torch.full((WORDS,), word, dtype=torch.int32))
        expected = (pattern + word) // WORDS * WORDS
        assert torch.equal(patterns(rounded[finite]), expected[finite])
        assert torch.equal(rounded.isnan(), value.isnan())
        assert torch.equal(patterns(rounded[value.isinf()]), pattern[value.isinf()])


@pytest.mark.parametrize("pattern", NANS, ids=hex)
def test_nan_of_any_payload_stays_nan_for_every_word(pattern):
    rounded = round_stochastic(one(pattern).expand(WORDS), ALL_WORDS)
    assert rounded.isnan().all()
    assert rounded.to(torch.bfloat16).isnan().all()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BITS = {BF16: 8, FP16: 11, FP32: 24}  # significant bits
COUNT = 50_000


def in_fp32(value: torch.Tensor) -> torch.Tensor:
    """Whether FP32 represents each of these FP64 values."""
    return value.float().double() == value


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at normal values."""
    return torch.exp2(torch.frexp(value.double())[1].double() - BITS[dtype] - 1)


def triples(dtype: torch.dtype, shift: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of either sign in [2**-6, 2**6), updates about 2**-shift of them, compensations up to half an ulp.

    Exponents span less than 53 bits, so FP64 adds them without error: weights are multiples of 2**-17 at least, updates
    have 24 bits from 2**-(6 + shift) down.
    """
    generator = torch.Generator().manual_seed(shift)
    uniform = torch.rand(3, COUNT, generator=generator)
    sign = torch.randint(0, 2, (3, COUNT), generator=generator) * 2.0 - 1
    weight = round_nearest(sign[0] * torch.exp2(uniform[0] * 12 - 6), dtype)
    update = sign[1] * weight * (0.5 + uniform[1]) * 2.0**-shift
    update[::2] = round_nearest(update[::2])  # short ones: their sum with the compensation mostly fits FP32
    compensation = round_nearest((sign[2] * uniform[2] * half_ulp(weight, dtype)).float(), BF16)
    return weight, update, compensation


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [1, 3, 6, 8, 10, 14, 18])
def test_nothing_is_lost_where_fp32_represents_it(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    assert torch.equal(round_nearest(total, dtype), total)
    wanted = weight.double() + update.double() + compensation.double()
    exact = in_fp32(update.double() + compensation.double())
    # |update + compensation| <= |weight|: by Dekker's theorem y - (total - weight) then has no error of its own.
    assert torch.equal((total.double() + rest.double())[exact], wanted[exact])
    assert exact.sum() >= COUNT // 20  # the identity was tested on something
    # Elsewhere y = fl(update + compensation) is off by half an FP32 ulp of itself at most.
    allowed = half_ulp(update.double() + compensation.double(), FP32)
    assert ((total.double() + rest.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [-6, -3, -1])
def test_updates_larger_than_the_weight(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    y = update.double() + compensation.double()
    wanted = weight.double() + y
    difference = total.double() - weight.double()
    exact = in_fp32(y) & in_fp32(difference) & in_fp32(y - difference)
    assert torch.equal((total.double() + rest.double())[exact], wanted[exact])
    assert exact.sum() >= COUNT // 20


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [1, 6, 10, 18])
def test_the_total_is_nearest_and_the_rest_within_half_an_ulp(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    y = update + compensation
    assert torch.equal(total, round_nearest(weight + y, dtype))
    # weight + y is rounded to FP32 first: another 2**-24 of the total; `frexp` gives the ulp of the total's binade.
    slack = half_ulp(total, FP32)
    assert (rest.double().abs() <= half_ulp(total, dtype) + slack).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nan_and_infinity_reach_the_weight(dtype):
    update = torch.tensor([math.nan, math.inf, -math.inf])
    total, _ = kahan_add(torch.ones(3), update, torch.zeros(3), dtype)
    assert total[0].isnan()
    assert total[1:].tolist() == [math.inf, -math.inf]


INT16, INT32 = torch.int16, torch.int32
UPPER = torch.arange(1 << 16, dtype=torch.int64)
LARGEST = torch.finfo(FP32).max


def stored(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair in its storage dtypes, BF16 and int16; storing loses nothing."""
    weight, remainder = split(master)
    assert torch.equal(weight.to(BF16).float().nan_to_num(), weight.nan_to_num())
    assert torch.equal(remainder.to(INT16).int(), remainder)
    return weight.to(BF16), remainder.to(INT16)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    return join(weight.float(), remainder.int())


@pytest.mark.parametrize("lower", FRACTIONS, ids=hex)
def test_every_upper_half_with_these_lower_halves_survives(lower):
    pattern = (UPPER << 16) + lower
    master = floats(pattern)
    weight, remainder = stored(master)
    found, nan = joined(weight, remainder), master.isnan()
    assert torch.equal(found[~nan].view(INT32), master[~nan].view(INT32))
    assert found[nan].isnan().all()
    assert weight[nan].isnan().all()
    assert not weight[~nan].isnan().any()


@pytest.mark.parametrize("lower", FRACTIONS, ids=hex)
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
