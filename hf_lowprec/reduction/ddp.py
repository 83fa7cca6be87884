"""DistributedDataParallel: a communication hook that averages each gradient bucket in FP32.

The all-reduce has two steps: an all-to-all sends each rank every rank's version of one shard of the bucket, which it
averages in FP32; an all-gather then distributes the averages. This sends as many bytes as a native all-reduce of the
same dtype. (NVIDIA's Megatron-LM has this reduce-scatter too: `reduce_scatter_with_fp32_accumulation`.)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.reduction.collectives import ScratchBuffers, all_gather, explain_lost_rank
from hf_lowprec.reduction.private_torch_apis import (
    comm_hook_states,
    forget_comm_hooks,
    joins_ranks,
    leave_gradients_to_hook,
)
from hf_lowprec.reduction.rank_mean import mean_in_rank_order

CHUNK_BYTES = 64 * 2**20
"""Bytes reduced at once. DDP's buckets are smaller by default, except that the first backward has only one bucket."""
SHARD_BYTES = 128
"""Shards of full and of padded chunks have a multiple of this size, so that all ranks' shards are aligned and a GPU
reads 128 bits at once. A chunk is not padded for that alone, which would copy it twice.
"""


TakeMeans = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[bool]]
"""Takes parameters and their averaged gradients, views of a bucket; returns for each whether it used the gradient."""


@dataclass
class _ChunkInFlight:
    """A chunk of a bucket between the start of its all-to-all and the end of its all-gather.

    Attributes:
        gradient: the chunk, a view of the bucket; its average will be written here.
        padded: the chunk, with zeros up to shards of one size; `gradient` itself if none are needed.
        received: every rank's version of this rank's shard of the chunk, as long as `padded`.
        work: handle of the running collective.
        on_complete: called when the average is in `gradient`.
    """

    gradient: Tensor
    padded: Tensor
    received: Tensor
    work: dist.Work
    on_complete: Callable[[], None] | None


class BucketAverager:
    """The state of the communication hook: it averages buckets over ranks, chunk by chunk in a pipeline of two.

    The all-to-all of a chunk runs while backward computes the next one. Its average and its all-gather follow when the
    next chunk starts, so all ranks issue their collectives in the same order, whatever their timing. At most two chunks
    are in flight, each with its own scratch buffers.

    Args:
        group: the process group to average over.
        on_last_bucket: called when the last bucket of a backward pass is done, if there is more than one rank.
        wait_for_first: complete a bucket that is marked as the first before returning. DDP with `static_graph=True`
            reduces all buckets of its first pass at the end, and marks each of them as the first.

    Attributes:
        take_means: functions that use averages as soon as they are ready; see `hand_over_means`.
    """

    def __init__(
        self, group: dist.ProcessGroup, on_last_bucket: Callable[[], None] | None = None, wait_for_first: bool = False
    ) -> None:
        self.group = group
        self.wait_for_first = wait_for_first
        self.on_last_bucket = on_last_bucket
        self.take_means: list[TakeMeans] = []
        self.scratch = ScratchBuffers()
        self._in_flight: list[_ChunkInFlight] = []
        self._parity = 0  # of the next chunk; selects between the scratch buffers of two chunks in flight
        self._streams: dict[torch.device, torch.Stream] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the chunks in flight and, like DDP itself, without the group; loading uses the default one."""
        return {"on_last_bucket": self.on_last_bucket, "wait_for_first": self.wait_for_first}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(dist.group.WORLD, **state)  # type: ignore[misc]

    def __call__(
        self, gradient: Tensor, is_first: bool, is_last: bool, on_mean: Callable[[], None] | None = None
    ) -> torch.futures.Future:
        """Average one bucket in place.

        Args:
            gradient: the bucket, a flat tensor. Buckets come in the same order on all ranks.
            is_first: whether it is the first bucket of a backward pass.
            is_last: whether it is the last one.
            on_mean: called when the averages are in `gradient`, before the future is completed.

        Returns:
            A future of `gradient`, completed when the averages are in it.
        """
        devices: list[int | str | torch.device] = [] if gradient.device.type == "cpu" else [gradient.device]
        future: torch.futures.Future = torch.futures.Future(devices=devices)

        def set_result() -> None:
            if on_mean is not None:
                on_mean()
            future.set_result(gradient)

        if self.group.size() == 1:
            set_result()
            return future
        if is_first:
            self._in_flight, self._parity = [], 0  # an interrupted pass may have left chunks behind
        with self._side_stream(gradient.device):
            *chunks, last_chunk = gradient.split(self._chunk_size(gradient))
            for chunk in chunks:
                self._enter_pipeline(chunk, None)
            self._enter_pipeline(last_chunk, set_result)
            if is_last or (is_first and self.wait_for_first):
                self._drain_pipeline()
        if is_last and self.on_last_bucket is not None:
            self.on_last_bucket()
        return future

    def _chunk_size(self, bucket: Tensor) -> int:
        """Return the elements of a chunk, whose shards have a multiple of `SHARD_BYTES`."""
        ranks = self.group.size()
        return max(CHUNK_BYTES // (ranks * SHARD_BYTES), 1) * ranks * SHARD_BYTES // bucket.element_size()

    def _shard_size(self, chunk: Tensor) -> int:
        """Return the elements of each rank's shard of a chunk, padding included."""
        ranks, count = self.group.size(), chunk.numel()
        if count % ranks == 0:
            return count // ranks
        unit = SHARD_BYTES // chunk.element_size()
        return -(-count // (ranks * unit)) * unit

    def _enter_pipeline(self, chunk: Tensor, on_complete: Callable[[], None] | None) -> None:
        """Start a chunk and advance each of the two chunks before it by one step."""
        if len(self._in_flight) > 1:
            self._complete(self._in_flight.pop(0))
        newest = self._start_all_to_all(chunk, on_complete)
        for earlier in self._in_flight:
            self._average_and_start_all_gather(earlier)
        self._in_flight.append(newest)
        self._parity = 1 - self._parity

    def _drain_pipeline(self) -> None:
        """Complete all chunks in flight. Only the newest one has not been averaged yet."""
        self._average_and_start_all_gather(self._in_flight[-1])
        while self._in_flight:
            self._complete(self._in_flight.pop(0))

    def _start_all_to_all(self, chunk: Tensor, on_complete: Callable[[], None] | None) -> _ChunkInFlight:
        """Send each rank its shard of a chunk."""
        ranks = self.group.size()
        count, shard_size = chunk.numel(), self._shard_size(chunk)
        padded = chunk
        if shard_size * ranks > count:
            padded = self.scratch.get(f"padded {self._parity}", shard_size * ranks, chunk)
            padded[:count] = chunk
            padded[count:] = 0
        received = self.scratch.get(f"received {self._parity}", shard_size * ranks, chunk)
        with explain_lost_rank(self.group):
            work = dist.all_to_all_single(received, padded, group=self.group, async_op=True)
        return _ChunkInFlight(chunk, padded, received, cast(dist.Work, work), on_complete)

    def _average_and_start_all_gather(self, chunk: _ChunkInFlight) -> None:
        """Average the shard that this rank received and send it to all ranks."""
        with explain_lost_rank(self.group):
            chunk.work.wait()
        ranks, rank = self.group.size(), self.group.rank()
        shard = chunk.padded.view(ranks, -1)[rank]
        mean_in_rank_order(chunk.received.view(ranks, -1), ranks, shard)
        with explain_lost_rank(self.group):
            chunk.work = all_gather(chunk.padded, shard, group=self.group, async_op=True)

    def _complete(self, chunk: _ChunkInFlight) -> None:
        """Wait for the averages of all ranks and put them where the gradient was."""
        with explain_lost_rank(self.group):
            chunk.work.wait()
        if chunk.padded is not chunk.gradient:
            chunk.gradient.copy_(chunk.padded[: chunk.gradient.numel()])
        if chunk.on_complete is not None:
            chunk.on_complete()

    def _side_stream(self, device: torch.device) -> AbstractContextManager:
        """Return a context with a stream after the current one, so that backward need not wait; no stream on a CPU."""
        if device.type == "cpu":
            return nullcontext()
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        self._streams[device].wait_stream(module.current_stream(device))
        return module.stream(self._streams[device])


def fp32_mean_hook(state: BucketAverager, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket; the hook that `DistributedDataParallel.register_comm_hook` takes."""
    on_mean = None
    if state.take_means:  # by now, DDP has copied the gradients into the bucket
        on_mean = functools.partial(_give_means, state.take_means, bucket.parameters(), bucket.gradients())
    return state(bucket.buffer(), bucket.index() == 0, bucket.is_last(), on_mean)


class FP32MeanDDP(DistributedDataParallel):
    """A DDP that keeps its hook when unpickled or copied, for which torch builds a new reducer without a hook."""

    averager: BucketAverager

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        forget_comm_hooks(self)  # torch copies its list of hooks, and registering adds to it
        self.register_comm_hook(self.averager, fp32_mean_hook)


def reduce_in_fp32(model: DistributedDataParallel) -> BucketAverager:
    """Make a DDP model average its gradients in FP32, by registering a communication hook.

    The model's class becomes `FP32MeanDDP`, unless it is a user-defined subclass of DDP.

    Args:
        model: the wrapped model, modified in place.

    Returns:
        The state of the hook.

    Raises:
        RuntimeError: the model already has a communication hook.
    """
    averager = BucketAverager(model.process_group, wait_for_first=model.static_graph)
    model.register_comm_hook(averager, fp32_mean_hook)
    if type(model) is DistributedDataParallel:
        model.__class__ = FP32MeanDDP
        model.averager = averager  # type: ignore[assignment]
    return averager


def averages_gradients(model: weakref.ref[DistributedDataParallel]) -> bool:
    """Return whether DDP averages gradients over all ranks, including those of the last forward pass.

    It does not in `no_sync`, nor if ranks may run out of inputs.
    """
    found = model()
    if found is None or joins_ranks(found):
        return False
    return bool(found.require_backward_grad_sync and found.require_forward_param_sync)


def hand_over_means(model: DistributedDataParallel, take_means: TakeMeans, argument: str) -> None:
    """Hand the averages of each bucket to `take_means` as soon as they are ready, during the backward pass.

    From then on, DDP itself writes no averages into `param.grad`. The hook does so for parameters whose averages were
    not used, so that other optimizers find what they expect.

    Args:
        model: the model.
        take_means: takes the averages.
        argument: the optimizer's argument that asks for it, for messages.

    Raises:
        RuntimeError: the model has not been prepared by `reduce_in_fp32`; or it has `find_unused_parameters` or
            `static_graph`, with which the used parameters are known only after the backward pass.
    """
    averager = next((state for state in comm_hook_states(model) if isinstance(state, BucketAverager)), None)
    if averager is None:
        raise RuntimeError(
            f"{argument} under DistributedDataParallel must wait for the mean over ranks, which only "
            "hf_lowprec's communication hook reports: call hf_lowprec.prepare_accelerator(accelerator) before "
            "accelerator.prepare or, without Accelerate, hf_lowprec.reduction.reduce_in_fp32(model) on the wrapped "
            "model"
        )
    for option, ways in (
        ("find_unused_parameters", "find_unused_parameters=False (with Trainer: ddp_find_unused_parameters=False)"),
        ("static_graph", "static_graph=False (with Trainer: ddp_static_graph=False)"),
    ):
        if getattr(model, option):
            raise RuntimeError(
                f"{argument} does not support DistributedDataParallel({option}=True), which finds out at "
                f"the end of the backward pass which parameters have gradients; set {ways}, or use FSDP2"
            )
    leave_gradients_to_hook(model)
    averager.take_means.append(take_means)


def _give_means(take_means: list[TakeMeans], params: Sequence[Tensor], means: Sequence[Tensor]) -> None:
    """Give a bucket's averages to the functions that use them, and the rest to `param.grad`."""
    used = [False] * len(params)
    for take in take_means:
        used = [before or now for before, now in zip(used, take(params, means), strict=True)]
    for param, mean, is_used in zip(params, means, used, strict=True):
        if is_used:
            continue
        if param.grad is None:
            param.grad = mean.clone()
        elif param.grad.data_ptr() != mean.data_ptr():
            param.grad.copy_(mean)
