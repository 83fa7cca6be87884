"""The mean over ranks that all reductions use: summed in a wider dtype in rank order, rounded once.

The order is fixed, so the result depends only on the gradients. 16-bit gradients are summed in FP32, whereas native
BF16 reductions round at every addition. FP32 gradients (of norms) are summed in FP64, so that the mean of equal
gradients is exact for them too, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.reduction.collectives import explain_lost_rank

CHUNK = 1 << 18
"""Elements summed at once: they fit a core's cache. Smaller chunks would cost more in calls than they save."""


def mean_in_rank_order(per_rank: Tensor, divisor: float, out: Tensor) -> Tensor:
    """Compute `out = round((per_rank[0] + per_rank[1] + …) / divisor)`, added from left to right in a wider dtype.

    Args:
        per_rank: shape (ranks, n), every rank's version of the same n elements, contiguous. The sum is FP32 for 16-bit
            elements, FP64 for FP32 ones.
        divisor: the number of ranks for a mean, 1 for a sum.
        out: shape (n,), of any floating dtype; rounded to nearest, ties to even.

    Returns:
        `out`.
    """
    if per_rank.device.type in ("cuda", "xpu") and find_spec("triton"):
        from hf_lowprec.reduction.rank_mean_kernel import launch_mean

        return launch_mean(per_rank, divisor, out)
    dtype = torch.float32 if per_rank.dtype.itemsize == 2 else torch.float64
    # A tensor, because on some devices torch divides by a number by multiplying with its reciprocal.
    divisor_tensor = torch.full((), divisor, dtype=dtype, device=per_rank.device)
    for begin in range(0, out.numel(), CHUNK):
        first, *rest = per_rank[:, begin : begin + CHUNK]
        total = first.to(dtype, copy=True)
        for gradient in rest:
            total += gradient
        out[begin : begin + CHUNK] = total.div_(divisor_tensor)
    return out


def mean_of_slices(slices: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, divisor: int) -> Tensor:
    """Send slices of gradients to the ranks that need their means, and compute those that this rank needs.

    Args:
        slices: for every rank, this rank's version of what that rank needs: 1-D tensors of one dtype. Their sizes must
            be the same on all ranks.
        group: the ranks.
        divisor: the number of ranks for a mean, 1 for a sum.

    Returns:
        The means that this rank needs, one after the other; 1-D, of the dtype of the slices.
    """
    counts = [sum(map(Tensor.numel, parts)) for parts in slices]
    sent = torch.cat([part for parts in slices for part in parts])
    own = counts[group.rank()]
    received = sent.new_empty(group.size() * own)
    with explain_lost_rank(group):
        dist.all_to_all_single(received, sent, [own] * group.size(), counts, group=group)
    return mean_in_rank_order(received.view(group.size(), own), divisor, sent.new_empty(own))
