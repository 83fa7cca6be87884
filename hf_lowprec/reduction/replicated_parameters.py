"""Gradients of parameters that every rank holds in full, beside others that are sharded over a device mesh.

Tensor and expert parallelism leave norms and routers as plain tensors. Their gradients are the same on all ranks, or
each belongs to other data: the mean over ranks serves both, and keeps replicas equal. But norms of single attention
heads see the heads of their rank only: their gradients are parts of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_lowprec.reduction.collectives import all_gather, explain_lost_rank
from hf_lowprec.reduction.rank_mean import mean_in_rank_order
from hf_lowprec.reduction.scratch_buffers import ScratchBuffers


def average_gradients(params: Iterable[nn.Parameter], is_complete: Callable[[], bool]) -> ScratchBuffers:
    """Average the gradients of `params` over all ranks when they are complete: in FP32, in rank order, rounded once.

    Args:
        params: trainable parameters, plain tensors with the same values on all ranks.
        is_complete: whether the gradients that a backward pass computes are those of the last micro-batch.

    Returns:
        The memory that the gradients of all ranks are received in.
    """
    scratch = ScratchBuffers()

    def average(param: Tensor) -> None:
        if is_complete() and param.grad is not None:
            world: Any = dist.group.WORLD
            param.grad.copy_(combine_ranks(param.grad, world, scratch, world.size()))

    for param in params:
        param.register_post_accumulate_grad_hook(average)
    return scratch


class PartialGradients:
    """Sums gradients over the ranks of a group, of parameters that each rank applies to its part of the activations.

    It sums each micro-batch by itself, before it is added to the others: in FP32 (FP64 for FP32 gradients), in rank
    order, rounded once.

    Args:
        module: its own trainable parameters are plain tensors, with the same values on all ranks of `group`. Those that
            FSDP2 gathers are watched once `watch` is called while they are gathered.
        group: the ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group
        self._scratch = ScratchBuffers()
        self._watched: Any = WeakIdKeyDictionary()

    def watch(self) -> None:
        """Sum the gradients of parameters that are new."""
        for param in self.module.parameters(recurse=False):
            if param.requires_grad and not hasattr(param, "device_mesh") and param not in self._watched:
                self._watched[param] = param.register_hook(self._sum)

    def _sum(self, gradient: Tensor) -> Tensor:
        return combine_ranks(gradient, self.group, self._scratch, divisor=1)


def combine_ranks(gradient: Tensor, group: dist.ProcessGroup, scratch: ScratchBuffers, divisor: int) -> Tensor:
    """The sum of a plain `gradient` over the ranks of `group`, divided by `divisor` and rounded once."""
    sent = gradient.detach().contiguous().view(-1)
    received = scratch.get("received", group.size() * sent.numel(), sent)
    with explain_lost_rank(group), torch.no_grad():
        all_gather(received, sent, group=group)
        result = mean_in_rank_order(received.view(group.size(), -1), divisor, torch.empty_like(sent))
        return result.view(gradient.shape)
