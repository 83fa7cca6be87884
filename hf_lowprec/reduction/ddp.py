"""DistributedDataParallel: a communication hook that averages each gradient bucket in FP32.

A reduce-scatter by all-to-all, then an all-gather: the bytes on the wire are those of a native all-reduce of the same
dtype. (NVIDIA's Megatron-LM reduces so too, by `reduce_scatter_with_fp32_accumulation`.)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.reduction.lost_ranks import exchanging
from hf_lowprec.reduction.mean import mean_in_rank_order
from hf_lowprec.reduction.scratch import Scratch

PIECE = 64 * 2**20
"""Bytes that are reduced at once. DDP's buckets are smaller by default, but one is all of its first pass."""


@dataclass
class _Piece:
    """Part of a bucket on its way."""

    gradient: Tensor
    padded: Tensor
    received: Tensor
    work: Any
    finished: Callable[[], None] | None


class BucketMeans:
    """The state of the hook: pieces of buckets on their way, and the memory they use.

    A piece's all-to-all runs while backward computes the next one; its sum and its all-gather follow when the next
    piece starts. So all ranks issue their collectives in the same order, whatever their timing, and two pieces need
    scratch memory at a time.

    Args:
        group: the process group to average over.
        finished: called when the last bucket of a backward pass is done, if there is more than one rank.
        first_alone: wait for what looks like the first bucket. DDP with `static_graph=True` reduces all buckets of its
            first pass at the end, and calls each of them the first.
    """

    def __init__(
        self, group: dist.ProcessGroup, finished: Callable[[], None] | None = None, first_alone: bool = False
    ) -> None:
        self.group = group
        self.first_alone = first_alone
        self.finished = finished
        self.scratch = Scratch()
        self._pending: list[_Piece] = []
        self._slot = 0
        self._streams: dict[torch.device, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """As DDP itself: without what is on its way, and for the default group."""
        return {"finished": self.finished, "first_alone": self.first_alone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(dist.group.WORLD, **state)  # type: ignore[misc]

    def __call__(self, gradient: Tensor, is_first: bool, is_last: bool) -> torch.futures.Future:
        """Average one bucket, a flat tensor, in place; buckets come in the order that all ranks share."""
        future = _future(gradient.device)
        done = functools.partial(future.set_result, gradient)
        if self.group.size() == 1:
            done()
            return future
        if is_first:
            self._pending, self._slot = [], 0  # an interrupted pass may have left some
        with self._lane(gradient.device):
            *pieces, last = gradient.split(self._piece(gradient))
            for piece in pieces:
                self._advance(piece, None)
            self._advance(last, done)
            if is_last or (is_first and self.first_alone):
                self._gather(self._pending[-1])
                while self._pending:
                    self._finish(self._pending.pop(0))
        if is_last and self.finished is not None:
            self.finished()
        return future

    def _piece(self, gradient: Tensor) -> int:
        """Elements of a piece, a multiple of the number of ranks."""
        ranks = self.group.size()
        return max(PIECE // gradient.element_size() // ranks, 1) * ranks

    def _advance(self, gradient: Tensor, finished: Callable[[], None] | None) -> None:
        """Start a piece, and take the two before it one step further."""
        if len(self._pending) > 1:
            self._finish(self._pending.pop(0))
        piece = self._start(gradient, finished)
        for earlier in self._pending:
            self._gather(earlier)
        self._pending.append(piece)
        self._slot = 1 - self._slot

    def _start(self, gradient: Tensor, finished: Callable[[], None] | None) -> _Piece:
        """Send each rank its part."""
        ranks = self.group.size()
        count, part = gradient.numel(), -(-gradient.numel() // ranks)
        padded = gradient
        if part * ranks > count:
            padded = self.scratch(f"padded {self._slot}", part * ranks, gradient)
            padded[:count] = gradient
            padded[count:] = 0
        received = self.scratch(f"received {self._slot}", part * ranks, gradient)
        with exchanging(self.group):
            work = dist.all_to_all_single(received, padded, group=self.group, async_op=True)
        return _Piece(gradient, padded, received, work, finished)

    def _gather(self, piece: _Piece) -> None:
        """Average the part that this rank received and send it to all."""
        with exchanging(self.group):
            piece.work.wait()
        ranks, rank = self.group.size(), self.group.rank()
        own = piece.padded.view(ranks, -1)[rank]
        mean_in_rank_order(piece.received.view(ranks, -1), ranks, own)
        with exchanging(self.group):
            piece.work = _all_gather(piece.padded, own, group=self.group, async_op=True)

    def _finish(self, piece: _Piece) -> None:
        """Leave the result where the gradient was; hand the bucket to DDP if this is its last piece."""
        with exchanging(self.group):
            piece.work.wait()
        if piece.padded is not piece.gradient:
            piece.gradient.copy_(piece.padded[: piece.gradient.numel()])
        if piece.finished is not None:
            piece.finished()

    def _lane(self, device: torch.device) -> Any:
        """A stream of our own behind the current one, so that backward does not wait for sums."""
        if device.type == "cpu":
            return nullcontext()
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        self._streams[device].wait_stream(module.current_stream(device))
        return module.stream(self._streams[device])


def fp32_mean_hook(state: BucketMeans, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook that `DistributedDataParallel.register_comm_hook` takes."""
    return state(bucket.buffer(), bucket.index() == 0, bucket.is_last())


class FP32MeanDDP(DistributedDataParallel):
    """A DDP that keeps its hook when it is unpickled or copied, where torch builds a new reducer without one."""

    means: BucketMeans

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._comm_hooks.clear()  # torch copies the list, and registering adds to it
        self.register_comm_hook(self.means, fp32_mean_hook)


def reduce_in_fp32(model: DistributedDataParallel) -> BucketMeans:
    """Let a model under DDP average its gradients in FP32, by a communication hook.

    Args:
        model: the wrapped model; in place.

    Returns:
        The state of the hook.

    Raises:
        RuntimeError: the model has a communication hook already.
    """
    state = BucketMeans(model.process_group, first_alone=model.static_graph)
    model.register_comm_hook(state, fp32_mean_hook)
    if type(model) is DistributedDataParallel:
        model.__class__ = FP32MeanDDP
        model.means = state  # type: ignore[assignment]
    return state


def _future(device: torch.device) -> torch.futures.Future:
    return torch.futures.Future() if device.type == "cpu" else torch.futures.Future(devices=[device])


def _all_gather(output: Tensor, part: Tensor, **options: Any) -> Any:
    # Torch 2.13 renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, **options)
