"""The mean over ranks that all reductions use: summed in a wider dtype in rank order, rounded once.

It also averages gradients that every rank holds in full, while other gradients are sharded over a device mesh: tensor
and expert parallelism leave norms and routers as plain tensors. Their gradients are the same on all ranks, or come from
different data: the mean over ranks is right for both, and keeps replicas equal. But norms of single attention heads see
only their rank's heads, so their gradients are parts of a sum.

The order is fixed, so the result depends only on the gradients. 16-bit gradients are summed in FP32, whereas native
BF16 reductions round at every addition. FP32 gradients (of norms) are summed in FP64, so that the mean of equal
gradients is exact for them too, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_lowprec.reduction.collectives import ScratchBuffers, all_gather, explain_lost_rank

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
    # A tensor, because on some devices torch divides by a number by multiplying by its reciprocal.
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


def average_gradients(params: Iterable[nn.Parameter], is_complete: Callable[[], bool]) -> ScratchBuffers:
    """Average the gradients of `params` over all ranks when they are complete: in FP32, in rank order, rounded once.

    Args:
        params: trainable parameters, plain tensors with the same values on all ranks.
        is_complete: whether the current backward pass is the last micro-batch's.

    Returns:
        The memory in which the gradients of all ranks are received.
    """
    scratch = ScratchBuffers()

    def average(param: Tensor) -> None:
        if is_complete() and param.grad is not None:
            world: Any = dist.group.WORLD
            param.grad.copy_(_combine_ranks(param.grad, world, scratch, world.size()))

    for param in params:
        param.register_post_accumulate_grad_hook(average)
    return scratch


class PartialGradients:
    """Sums, over the ranks of a group, gradients of parameters that each rank applies to its part of the activations.

    It sums each micro-batch by itself, before the micro-batch is added to the others: in FP32 (FP64 for FP32
    gradients), in rank order, rounded once.

    Args:
        module: a module whose own trainable parameters are plain tensors, with the same values on all ranks of `group`.
            Parameters that FSDP2 gathers are watched once `watch` is called while they are gathered.
        group: the ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group
        self._scratch = ScratchBuffers()
        self._watched: Any = WeakIdKeyDictionary()

    def watch(self) -> None:
        """Start summing the gradients of new parameters."""
        for param in self.module.parameters(recurse=False):
            if param.requires_grad and not hasattr(param, "device_mesh") and param not in self._watched:
                self._watched[param] = param.register_hook(self._sum)

    def _sum(self, gradient: Tensor) -> Tensor:
        return _combine_ranks(gradient, self.group, self._scratch, divisor=1)


def _combine_ranks(gradient: Tensor, group: dist.ProcessGroup, scratch: ScratchBuffers, divisor: int) -> Tensor:
    """Return the sum of a plain `gradient` over the ranks of `group`, divided by `divisor` and rounded once."""
    sent = gradient.detach().contiguous().view(-1)
    received = scratch.get("received", group.size() * sent.numel(), sent)
    with explain_lost_rank(group), torch.no_grad():
        all_gather(received, sent, group=group)
        result = mean_in_rank_order(received.view(group.size(), -1), divisor, torch.empty_like(sent))
        return result.view(gradient.shape)
