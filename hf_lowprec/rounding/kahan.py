"""Kahan summation: a compensation carries what rounding keeps out of a stored weight."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import round_nearest


def kahan_add(
    weight: Tensor, update: Tensor, compensation: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Add `update` to a stored weight by Kahan summation, and return the rounding error, which the next step adds.

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
