"""Rounding of FP32 values for 16-bit storage, and compensated addition.

Rounding functions return FP32 values that the storage dtype represents exactly, so the cast that stores them is
lossless. They round with integer operations on the bit pattern because casts are not dependable: compilers drop
`.to(bfloat16).float()` pairs, and some backends truncate where others round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

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
        pattern = _pattern(value)
        # If the last kept bit is odd, setting the lowest bit turns a tie into a little more than a tie, so that it
        # rounds up. No other value changes sides.
        return (((pattern | ((pattern >> 16) & 1)) + 0x7FFF) & -0x10000).view(torch.float32)
    if dtype == torch.float16:
        pattern = _pattern(value)
        magnitude = pattern & _MAGNITUDE
        normal = (magnitude + (((magnitude >> 13) & 1) + 0xFFF)) & -0x2000
        normal = torch.where(normal >= 0x47800000, _INFINITY, normal)  # 65536 = 2^16 and above
        # Below 2^-14 the spacing is 2^-24, as that of FP32 in [0.5, 1), so an FP32 addition does the rounding.
        subnormal = ((magnitude.view(torch.float32) + 0.5) - 0.5).view(torch.int32)
        rounded = torch.where(magnitude < 0x38800000, subnormal, normal)
        rounded = torch.where(magnitude > _INFINITY, magnitude, rounded)
        return (rounded | (pattern & _SIGN)).view(torch.float32)
    raise ValueError(f"dtype={dtype} cannot be rounded to; use torch.bfloat16, torch.float16 or torch.float32")


def round_stochastic(value: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding to BF16: add 16 random bits below the mantissa, then truncate.

    The value rounds away from zero with a probability equal to its distance from the lower neighbour, in ulps, so the
    expectation is the value itself (Zamirai et al., arXiv:2010.06192; Ozkara et al., arXiv:2502.20566). A value
    that BF16 represents never changes.

    Args:
        value: FP32 tensor of any shape.
        bits: int32 tensor of the same shape, uniform in [0, 65536).

    Returns:
        FP32 tensor of the same shape, representable in BF16. NaN stays NaN, infinities stay, and only values beyond the
        largest finite BF16 can become infinite.
    """
    return ((_pattern(value) + bits) & -0x10000).view(torch.float32)


def kahan_add(
    weight: Tensor, update: Tensor, compensation: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Kahan summation: add `update` to a stored weight, and return the rounding error to add it in the next step.

    Zamirai et al., arXiv:2010.06192, Alg. 5:
    `y = update + compensation; total = round(weight + y); compensation' = y - (total - weight)`.

    Args:
        weight: FP32 tensor of values that `dtype` represents.
        update: FP32 tensor, the change before rounding.
        compensation: FP32 tensor, the part of earlier updates that rounding has kept out of the weight.
        dtype: the weight's storage dtype.

    Returns:
        `(total, compensation')`, both FP32; `total` is representable in `dtype`, `compensation'` is not rounded yet.
    """
    compensated = update + compensation
    total = round_nearest(weight + compensated, dtype)
    return total, compensated - (total - weight)


def sqrt_rn(value: Tensor) -> Tensor:
    """Correctly rounded FP32 square root; `torch.sqrt` on CPU is off by one ulp for about a fifth of all values.

    Rounding twice, to FP64 and then to FP32, gives the correct result because FP64's 53 bits are more than 2·24 + 2.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(sqrt_rn, (value,), value)
    return value.double().sqrt().float()


def quiet_nan(value: Tensor) -> Tensor:
    """Replace every NaN of `value` by the one whose payload is only the quiet bit.

    Rounding adds to the bit pattern, and a NaN with a full payload would overflow into a number. A renderer may leave
    this out where no such NaN can occur.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(quiet_nan, (value,), value)
    return torch.where(value != value, float("nan"), value)


def _pattern(value: Tensor) -> Tensor:
    """The bits of `value` as int32, with quiet NaNs."""
    return quiet_nan(value).view(torch.int32)
