"""The distance between neighbouring numbers of a floating-point dtype."""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENTS = 256
"""The number of values that the exponent field of FP32 has."""
_BIAS = 127


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from numbers to the next number of `dtype` of larger magnitude.

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
    """The same distance for each value of the exponent field of FP32.

    Returns:
        FP64 tensor of 256 elements; number k is that of magnitudes from 2^(k-127) up to, not including, 2^(k-126).
    """
    info = torch.finfo(dtype)
    powers = torch.exp2(torch.arange(EXPONENTS, dtype=torch.float64) - _BIAS)
    return powers.clamp(min=info.smallest_normal) * info.eps
