"""Round to nearest even and the correctly rounded square root: exhaustive tests against exact arithmetic.

The references are the IEEE 754 definitions: compare the distances to both neighbours (exact in FP64, since the operands
are FP32 values less than one ulp apart), and decide ties by the parity of the neighbour's pattern.
"""

import math

import numpy as np
import pytest
import torch

from hf_lowprec.rounding import round_nearest, sqrt_rn
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
