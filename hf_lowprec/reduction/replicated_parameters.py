"""Gradients of parameters that every rank holds in full, beside others that are sharded over a device mesh.

Tensor and expert parallelism leave norms and routers as plain tensors. All ranks compute the same gradients of these,
except where each works on data of its own; the mean over ranks serves both, and keeps replicas equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
            mean_over_ranks(param.grad, dist.group.WORLD, scratch, divide=True)  # type: ignore[arg-type]

    for param in params:
        param.register_post_accumulate_grad_hook(average)
    return scratch


def mean_over_ranks(gradient: Tensor, group: dist.ProcessGroup, scratch: ScratchBuffers, divide: bool) -> None:
    """Replace `gradient`, a plain tensor, by its mean over the ranks of `group`, or by its sum, rounded once."""
    ranks, sent = group.size(), gradient.detach().contiguous().view(-1)
    received = scratch.get("received", ranks * sent.numel(), sent)
    with explain_lost_rank(group), torch.no_grad():
        all_gather(received, sent, group=group)
        result = mean_in_rank_order(received.view(ranks, -1), ranks if divide else 1, torch.empty_like(sent))
        gradient.copy_(result.view(gradient.shape))
