"""Stochastic rounding of FP32 numbers to fewer bits, on the bit pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import bit_pattern


def round_stochastic(value: Tensor, bits: Tensor, dropped: int = 16) -> Tensor:
    """Stochastic rounding: add random bits to the low bits that are dropped, then truncate. 16 bits less are BF16.

    The value rounds away from zero with a probability equal to its distance from the lower neighbour, in ulps, so the
    expectation is the value itself (Zamirai et al., arXiv:2010.06192; Ozkara et al., arXiv:2502.20566). A value
    without low bits never changes.

    Args:
        value: FP32 tensor of any shape.
        bits: int32 tensor of the same shape, uniform in [0, 2^dropped).
        dropped: the number of low bits that become zero.

    Returns:
        FP32 tensor of the same shape, by default representable in BF16. NaN stays NaN, infinities stay, and only values
        beyond the largest finite number without low bits can become infinite.
    """
    return ((bit_pattern(value) + bits) & -(1 << dropped)).view(torch.float32)
