"""Low bits: what a 16-bit weight lacks of an FP32 number.

They come in two forms:

- A BF16 difference, as Kahan's compensation: 8 bits of what the weight lacks, for BF16 and FP16 weights.
- An int16 remainder, see `split.py`: all that a BF16 weight lacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import round_nearest
from hf_lowprec.rounding.split import join, split

ROUNDED_OFF_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.bfloat16}
"""The dtypes of the low bits that a cast rounds off, by dtype of the weight: remainders, and differences."""


def fp32_value(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Return the number that a weight and its low bits hold together.

    Args:
        weight: BF16, FP16 or FP32 tensor of 16-bit numbers.
        low_bits: BF16 (or FP32) or int16 tensor of the same shape.

    Returns:
        FP32 tensor of the same shape.
    """
    if low_bits.is_floating_point():
        return weight.float() + low_bits.float()
    return join(weight.float(), low_bits.int())


def fp64_value(weight: Tensor, low_bits: Tensor | None) -> Tensor:
    """Return the number that a weight and its low bits, if there are any, hold together; FP64, without rounding."""
    if low_bits is None or low_bits.is_floating_point():
        return weight.double() if low_bits is None else weight.double() + low_bits.double()
    return join(weight.float(), low_bits.int()).double()


def rounded_off(value: Tensor, weight: Tensor) -> Tensor:
    """Return the low bits that a cast of `value` to `weight` rounds off.

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
    """Return a weight and the low bits that together hold `value`, for a weight whose training continues.

    Args:
        value: FP32 tensor of any shape.
        dtype: the weight's dtype: BF16 or FP16.
        low_bits_dtype: BF16 for a compensation, int16 for a remainder, which needs a BF16 weight.

    Returns:
        `(weight, low bits)` of these dtypes.
    """
    if low_bits_dtype.is_floating_point:
        weight = round_nearest(value, dtype).to(dtype)
        return weight, as_compensation(weight, value - weight.float())
    weight, remainder = split(value)
    return weight.to(dtype), remainder.to(low_bits_dtype)


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


def chunk_size(device: torch.device) -> int:
    """Return the number of elements to compute at once.

    On a CPU, temporaries stay in the cache; on a GPU, they take little memory.
    """
    return (1 << 15) * min(torch.get_num_threads(), 4) if device.type == "cpu" else 1 << 20
