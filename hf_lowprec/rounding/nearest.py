"""Rounding to nearest, for storage as BF16 or FP16.

It works on the bit pattern, with integer operations, because casts are not dependable: compilers drop
`.to(bfloat16).float()` pairs, and some backends truncate where others round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import bit_pattern

LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
"""The floating-point dtypes of 16 bits."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module, as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


_MAGNITUDE = 0x7FFFFFFF
_SIGN = -0x80000000
_INFINITY = 0x7F800000


def round_nearest(value: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Round to nearest, ties to even (IEEE 754 §4.3.1), for storage as `dtype`.

    Args:
        value: FP32 tensor of any shape.
        dtype: `torch.bfloat16` or `torch.float16`; `torch.float32` returns `value` as it is.

    Returns:
        FP32 tensor of the same shape; every element is exactly representable in `dtype`. NaN stays NaN, infinities
        stay, and magnitudes of at least half an ulp above the largest finite value become infinite.

    Raises:
        ValueError: `dtype` is none of these.
    """
    if dtype == torch.float32:
        return value
    if dtype == torch.bfloat16:
        pattern = bit_pattern(value)
        # If the last kept bit is odd, setting the lowest bit lifts a tie slightly above a tie, so that it rounds up.
        # No other value rounds differently.
        return (((pattern | ((pattern >> 16) & 1)) + 0x7FFF) & -0x10000).view(torch.float32)
    if dtype == torch.float16:
        pattern = bit_pattern(value)
        magnitude = pattern & _MAGNITUDE
        normal = (magnitude + (((magnitude >> 13) & 1) + 0xFFF)) & -0x2000
        normal = torch.where(normal >= 0x47800000, _INFINITY, normal)  # 65536 = 2^16 and above
        # Below 2^-14 the spacing is 2^-24, as that of FP32 in [0.5, 1), so an FP32 addition does the rounding.
        subnormal = ((magnitude.view(torch.float32) + 0.5) - 0.5).view(torch.int32)
        rounded = torch.where(magnitude < 0x38800000, subnormal, normal)
        rounded = torch.where(magnitude > _INFINITY, magnitude, rounded)
        return (rounded | (pattern & _SIGN)).view(torch.float32)
    raise ValueError(f"dtype={dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")


EXPONENTS = 256
"""The number of values that the exponent field of FP32 has."""
_BIAS = 127


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from numbers to the next number of `dtype` of larger magnitude.

    Args:
        value: finite numbers of any shape, in FP32 or a 16-bit dtype.
        dtype: `torch.bfloat16`, `torch.float16` or `torch.float32`.

    Returns:
        FP64 tensor of the shape of `value`.
    """
    info = torch.finfo(dtype)
    power = (value.float().view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.double().clamp(min=info.smallest_normal) * info.eps


def spacings_by_exponent(dtype: torch.dtype) -> Tensor:
    """Return the distance to the next number of `dtype` for each value of the exponent field of FP32.

    Returns:
        FP64 tensor of 256 elements; number k is that of magnitudes from 2^(k-127) up to, not including, 2^(k-126).
    """
    info = torch.finfo(dtype)
    powers = torch.exp2(torch.arange(EXPONENTS, dtype=torch.float64) - _BIAS)
    return powers.clamp(min=info.smallest_normal) * info.eps
