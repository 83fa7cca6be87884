"""Split FP32 weights: a BF16 weight for the model, and the rest of the FP32 master weight as an integer.

The bit patterns of FP32 numbers of one sign are in the order of their magnitudes. So the pattern of the master, rounded
to a multiple of 65536, is that of the nearest BF16 weight, and the difference, the remainder, fits in 16 bits:
`pattern(master) = pattern(weight) + remainder`. Ties round away from zero, so that remainders are -32768 to 32767. If
ties went to even weights, both 32768 and -32768 would occur, which 16 bits cannot tell apart.

The pair takes as much memory as a Kahan weight and its compensation, and loses nothing. NVIDIA's Transformer Engine
stores master weights in the same way (`FusedAdam`, `store_param_remainders`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import bit_pattern

_HALF = 0x8000
_UPPER_HALF = -0x10000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 numbers into BF16 weights and remainders. `join` restores them bit for bit, except payloads of NaN.

    The weight is the nearest BF16 number, and ties round away from zero. From half an ulp above the largest finite BF16
    number on, it is infinite, while the master stays finite. Zeros keep their sign, and subnormal numbers are like
    others. NaN gets a NaN as weight.

    Args:
        master: FP32 tensor of any shape.

    Returns:
        `(weight, remainder)`: FP32 tensor of values that BF16 represents, and int32 tensor of values that int16 holds.
    """
    pattern = bit_pattern(master)
    upper = (pattern + _HALF) & _UPPER_HALF
    return upper.view(torch.float32), pattern - upper


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 master weights that `split` turned into `weight` and `remainder`.

    User code may have set weights since then, to zero for example, and left the remainders of other numbers. They
    change a weight by at most half a spacing of BF16, except where the pattern becomes NaN: a zero with a negative
    remainder, infinity with a positive one. `split` makes a NaN only with a NaN as weight, so there the weight itself
    is returned.

    Args:
        weight: FP32 tensor of values that BF16 represents.
        remainder: int32 tensor of the same shape, of values that int16 holds.

    Returns:
        FP32 tensor of the same shape.
    """
    joined = (weight.view(torch.int32) + remainder).view(torch.float32)
    return torch.where(joined != joined, weight, joined)
