"""Dither: a random number added to a stored weight, small enough that the sum still rounds to that weight.

16-bit weights all begin exactly on the grid of their dtype, and none moves before its updates add up to half a spacing.
With a dither as first compensation (see `kahan.py`), it is as if they had been rounded from FP32 weights: from the
first step on, the share of weights that move to a neighbour is proportional to the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import bit_pattern
from hf_lowprec.rounding.nearest import round_nearest


def dither(weight: Tensor, bits: Tensor) -> Tensor:
    """A random number, uniform over the interval of values that round to `weight`, relative to it.

    The interval ends halfway to the two neighbours. Below a power of two the neighbour is half as far, so the interval
    is not symmetric there.

    Args:
        weight: BF16 or FP16 tensor of any shape.
        bits: int32 tensor of the same shape, uniform in [0, 65536).

    Returns:
        FP32 tensor of the same shape, exact (it is not rounded to 16 bits). Zero for zeros, infinities and NaN, and for
        the largest finite values, whose upper neighbour is infinite.
    """
    pattern = weight.view(torch.int16) & 0x7FFF
    magnitude = pattern.view(weight.dtype).float()
    above = (pattern + 1).view(weight.dtype).float() - magnitude
    below = magnitude - (pattern - 1).view(weight.dtype).float()
    # Both widths are powers of two, so nothing here rounds.
    value = (above + below) * ((bits.float() + 0.5) * 2.0**-17) - below * 0.5
    value = torch.where((magnitude > 0) & torch.isfinite(above), value, 0.0)
    return torch.where(weight < 0, -value, value)


def as_compensation(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Round what an FP32 value has beyond a stored `weight` to BF16, such that weight + result still rounds to weight.

    Half a spacing is a tie, which goes to the even weight. So the low bits of even weights are rounded to nearest, and
    may become half a spacing; those of odd weights are truncated. On average over both, as many weights are within
    reach of an update at their neighbour's side as before rounding.

    Args:
        weight: BF16 or FP16 tensor of any shape.
        low_bits: FP32 tensor of the same shape, the FP32 value minus `weight`, which that value rounds to.

    Returns:
        BF16 tensor of the same shape. Values that are not finite become zero.
    """
    low_bits = torch.where(torch.isfinite(low_bits), low_bits, 0.0)
    truncated = (bit_pattern(low_bits) & -0x10000).view(torch.float32)
    is_odd = (weight.view(torch.int16) & 1) == 1
    return torch.where(is_odd, truncated, round_nearest(low_bits)).to(torch.bfloat16)
