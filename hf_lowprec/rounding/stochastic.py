"""Stochastic rounding of FP32 numbers to BF16, on the bit pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.fp32_math import bit_pattern

_UPPER_HALF = -0x10000


def round_stochastic(value: Tensor, bits: Tensor) -> Tensor:
    """Round stochastically: add random bits to the 16 low bits that BF16 drops, then truncate.

    The value rounds away from zero with a probability equal to its distance from the lower neighbour, in ulps, so the
    expectation is the value itself (Zamirai et al., arXiv:2010.06192; Ozkara et al., arXiv:2502.20566). A value
    without low bits never changes.

    Args:
        value: FP32 tensor of any shape.
        bits: int32 tensor of the same shape, uniform in [0, 65536).

    Returns:
        FP32 tensor of the same shape, representable in BF16. NaN stays NaN, infinities stay, and only values
        beyond the largest finite number without low bits can become infinite.
    """
    return ((bit_pattern(value) + bits) & _UPPER_HALF).view(torch.float32)
