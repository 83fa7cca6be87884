"""Dither: a random number added to a stored weight, small enough that the sum still rounds to that weight.

16-bit weights all begin exactly on the grid of their dtype, and none moves before its updates add up to half a spacing.
With a dither as first compensation (see `kahan.py`), it is as if they had been rounded from FP32 weights: from the
first step on, the share of weights that move to a neighbour is proportional to the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of an FP32 mantissa that a 16-bit dtype lacks."""
_SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-14}
"""Smaller weights get no dither: zeros, and subnormal FP16 numbers, which have another spacing as FP32 numbers."""


def dither(weight: Tensor, bits: Tensor) -> Tensor:
    """A random number such that `weight` plus it rounds to `weight`.

    As likely positive as negative, and uniform up to halfway to either neighbour. The neighbour below a power of two is
    half as far, so twice as many weights move there, half as far each: on average, weights move as much as the updates.

    Args:
        weight: BF16 or FP16 tensor of any shape.
        bits: int32 tensor of the same shape, uniform in [0, 65536).

    Returns:
        FP32 tensor of the same shape, not rounded to 16 bits. Zero for zeros and subnormal FP16 weights; anything for
        infinities and NaN.
    """
    dropped, exact = _DROPPED_BITS[weight.dtype], weight.float()
    # In FP32's bit patterns, the values that round to the weight are those less than half a 16-bit pattern away.
    offset = ((bits >> (16 - dropped)) | 1) - (1 << (dropped - 1))
    value = (exact.view(torch.int32) + offset).view(torch.float32) - exact
    return torch.where(exact.abs() >= _SMALLEST[weight.dtype], value, 0.0)


def as_compensation(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Round what an FP32 value has beyond a stored `weight` to BF16, such that weight + result still rounds to weight.

    Half a spacing is a tie, which goes to the even weight. So the low bits of even weights are rounded to nearest, and
    may become half a spacing; those of odd weights are truncated.

    Args:
        weight: BF16 or FP16 tensor of any shape.
        low_bits: FP32 tensor of the same shape, the FP32 value minus `weight`, which that value rounds to.

    Returns:
        BF16 tensor of the same shape. Values that are not finite become zero.
    """
    truncated = (low_bits.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    is_odd = (weight.view(torch.int16) & 1).bool()
    return torch.where(is_odd, truncated, low_bits.to(torch.bfloat16)).nan_to_num_(0.0, 0.0, 0.0)
