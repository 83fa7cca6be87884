"""The mean of what the ranks have, which every reduction here computes: a wide sum in rank order, one rounding.

The order is fixed, so the result is a function of the gradients alone; the sum of 16-bit gradients is FP32, where
native reductions of BF16 round at every addition. FP32 gradients (of norms) are summed in FP64, so that the mean of
equal ones is exact there too, for any number of ranks.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements that are summed while they stay in a core's cache; fewer cost more calls than they save."""


def mean_in_rank_order(versions: Tensor, divisor: int, out: Tensor) -> Tensor:
    """`out = round((wide(versions[0]) + wide(versions[1]) + …) / divisor)`: additions from left to right.

    Args:
        versions: (ranks, n), each rank's version of the same n elements, contiguous. Sums are FP32 for 16-bit versions,
            FP64 for FP32 ones.
        divisor: the number of ranks for a mean, 1 for a sum.
        out: (n,), of any floating dtype; rounded to nearest, ties to even, once.

    Returns:
        `out`.
    """
    if versions.device.type in ("cuda", "xpu") and find_spec("triton"):
        from hf_lowprec.reduction.kernels import launch_mean

        return launch_mean(versions, divisor, out)
    dtype = torch.float32 if versions.dtype.itemsize == 2 else torch.float64
    # A tensor, because torch multiplies by the reciprocal of a number on some devices.
    by = torch.full((), divisor, dtype=dtype, device=versions.device)
    for begin in range(0, out.numel(), BLOCK):
        first, *others = versions[:, begin : begin + BLOCK]
        total = first.to(dtype, copy=True)
        for other in others:
            total += other
        out[begin : begin + BLOCK] = total.div_(by)
    return out
