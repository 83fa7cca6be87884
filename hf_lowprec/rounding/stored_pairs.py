"""An FP32 number as a 16-bit weight and its low bits, which come in three forms.

- A BF16 difference, as Kahan's compensation: 8 bits of what the weight lacks, for BF16 and FP16 weights.
- An int16 remainder, see `split.py`: all that a BF16 weight lacks.
- An int8 remainder: the upper half of that, of a number of 24 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.dither import as_compensation
from hf_lowprec.rounding.nearest import round_nearest
from hf_lowprec.rounding.split import LOW_BITS_OF_24, join, split

_DROPPED_BITS = {torch.int16: 0, torch.int8: LOW_BITS_OF_24}

ROUNDED_OFF_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.bfloat16}
"""The dtypes of the low bits that a cast rounds off, by dtype of the weight: remainders, and differences."""


def fp32_value(weight: Tensor, low_bits: Tensor, dither: Tensor | float = 0.0) -> Tensor:
    """The number that a weight and its low bits hold together.

    Args:
        weight: BF16, FP16 or FP32 tensor of 16-bit numbers.
        low_bits: BF16 (or FP32), int16 or int8 tensor of the same shape.
        dither: FP32 tensor, subtracted from it.

    Returns:
        FP32 tensor of the same shape.
    """
    if low_bits.is_floating_point():
        return weight.float() + (low_bits.float() - dither)
    return _joined(weight, low_bits) - dither


def fp64_value(weight: Tensor, low_bits: Tensor | None) -> Tensor:
    """The number that a weight and its low bits, if there are any, hold together; FP64, without rounding."""
    if low_bits is None or low_bits.is_floating_point():
        return weight.double() if low_bits is None else weight.double() + low_bits.double()
    return _joined(weight, low_bits).double()


def dropped_bits(remainder: Tensor) -> int:
    """The number of low bits of FP32 that a remainder does not hold."""
    return _DROPPED_BITS[remainder.dtype]


def _joined(weight: Tensor, remainder: Tensor) -> Tensor:
    return join(weight.float(), remainder.int() << dropped_bits(remainder))


def rounded_off(value: Tensor, weight: Tensor) -> Tensor:
    """The low bits that a cast of `value` to `weight` rounds off.

    Args:
        value: FP32 tensor of any shape.
        weight: BF16 or FP16 tensor of the same shape: `value`, rounded to nearest, ties to even.

    Returns:
        int16 tensor of the same shape for BF16 weights: remainders, but at most 32767, where a tie needs 32768. BF16
        for FP16 weights.
    """
    dtype = ROUNDED_OFF_DTYPES[weight.dtype]
    if dtype.is_floating_point:
        return as_compensation(weight, value - weight.float())
    remainder = value.view(torch.int32) - weight.float().view(torch.int32)
    return remainder.clamp(-0x8000, 0x7FFF).to(dtype)


def stored_pair(value: Tensor, dtype: torch.dtype, low_bits_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and the low bits that hold `value` together with it, for a weight that is trained on.

    Args:
        value: FP32 tensor of any shape.
        dtype: of the weight; BF16 or FP16.
        low_bits_dtype: BF16 for a compensation, int16 or int8 for a remainder, which needs a BF16 weight.

    Returns:
        `(weight, low bits)` of these dtypes. With int8, `value` is rounded to the nearest number of 24 bits that
        does not round to another weight.
    """
    if low_bits_dtype.is_floating_point:
        weight = round_nearest(value, dtype).to(dtype)
        return weight, as_compensation(weight, value - weight.float())
    weight, remainder = split(value)
    if low_bits_dtype == torch.int8:
        half = 1 << (LOW_BITS_OF_24 - 1)
        remainder = ((remainder + half) >> LOW_BITS_OF_24).clamp(max=0x7F)
    return weight.to(dtype), remainder.to(low_bits_dtype)
