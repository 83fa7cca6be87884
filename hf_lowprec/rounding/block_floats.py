"""States in 8 bits: small floats under an exponent that 32 neighbouring elements share.

A block is 32 consecutive elements of a row. Its scale is the exponent of its largest element. A code is what remains of
an element's FP32 pattern below that exponent, rounded stochastically to fewer bits, so encoding is the rounding of
`stochastic.py` with another number of bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_lowprec.rounding.fp32_math import bit_pattern

BLOCK = 32
"""Elements that share a scale."""

_MAGNITUDE = 0x7FFFFFFF


def block_max(value: Tensor) -> Tensor:
    """The largest of each block of 32 consecutive integers, in place of each of them.

    Args:
        value: int32 tensor of whole blocks, none of them negative.

    Returns:
        int32 tensor of the same shape.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(block_max, (value,), value)
    return value.view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(value.shape)


def encode(value: Tensor, bits: Tensor, nonnegative: bool) -> tuple[Tensor, Tensor]:
    magnitude = bit_pattern(value) & _MAGNITUDE
    octaves, shift = (32, 20) if nonnegative else (16, 20)
    top = (block_max(magnitude) + ((1 << shift) - 1)) >> 23
    base = (top + 1 - octaves) << 23
    offset = magnitude - base
    code = (offset + (bits << (shift - 16))) >> shift
    code = torch.where(code > 0, code, 1)
    code = torch.where(magnitude == 0, 0, code)
    if not nonnegative:
        code = torch.where(value < 0.0, code | 0x80, code)
    return code, top


def decode(code: Tensor, scale: Tensor, nonnegative: bool) -> Tensor:
    octaves, shift = (32, 20) if nonnegative else (16, 20)
    base = (scale + 1 - octaves) << 23
    magnitude = code & (0xFF if nonnegative else 0x7F)
    value = ((magnitude << shift) + base).view(torch.float32)
    value = torch.where(magnitude == 0, 0.0, value)
    return value if nonnegative else torch.where((code & 0x80) != 0, -value, value)
