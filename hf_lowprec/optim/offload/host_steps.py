"""Steps on the host for parameters on a device.

Parameters are stepped bucket by bucket: weights and gradients of a bucket are copied to the host, a thread steps them
there by an ordinary backend of the CPU, and the new weights are copied back. Meanwhile the device computes, for example
the rest of the backward pass, and the next bucket is copied. A few buckets share the host's staging memory in turn.

The states never leave the host, so a parameter's states and its weight are always of the same step once `finish` has
returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.offload import device_copies
from hf_lowprec.optim.offload.device_copies import DeviceCopies, Pair
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.clipping import square_sum
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.param_entry import ParamEntry

BUCKET_ELEMENTS = 1 << 24
"""A bucket ends once it has this many elements."""
SLOTS = 3
"""Buckets that are on the host at once: one is fetched, one is stepped, and one is sent back."""
_LINE = 64


class Slot:
    """Staging memory of one bucket at a time.

    Attributes:
        stepped: the step of the bucket that has it, whose result is the event after which its weights are sent.
    """

    def __init__(self) -> None:
        self.stepped: Future[Any] | None = None
        self._memory: Tensor | None = None

    def memory(self, size: int, copies: DeviceCopies) -> Tensor:
        """At least `size` bytes, the same memory as before if that is enough."""
        if self._memory is None or self._memory.numel() < size:
            self._memory = copies.host_memory(size)
        return self._memory


class HostSteps:
    """The thread that steps buckets on the host, and their staging memory, of one optimizer."""

    def __init__(self) -> None:
        self._slots = [Slot() for _ in range(SLOTS)]
        self._next_slot = itertools.cycle(self._slots)
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._running: list[Future[Any]] = []

    def copies(self, device: torch.device) -> DeviceCopies:
        """The copies of `device`."""
        if device not in self._copies:
            self._copies[device] = device_copies.DeviceCopies(device)
        return self._copies[device]

    def next_slot(self) -> Slot:
        """The slot of the next bucket of a plan."""
        return next(self._next_slot)

    def submit(self, bucket: Bucket, copies: DeviceCopies) -> None:
        """Copy the bucket to the host, have the thread step it, and copy its weights back."""
        slot = bucket.slot
        if slot.stepped is not None:
            copies.wait(slot.stepped.result())
        fetched = copies.fetch(bucket.to_fetch())

        def run() -> Any:
            copies.wait(fetched)
            with torch.no_grad():
                return copies.send(bucket.step())

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hf_lowprec steps on the host")
        slot.stepped = self._thread.submit(run)
        self._running.append(slot.stepped)

    def finish(self) -> None:
        """Wait until all buckets are stepped; what the device computes from now on sees their new weights.

        Raises:
            RuntimeError: a copy or a step failed. Some buckets have been stepped, and others have not.
        """
        running, self._running = self._running, []
        for stepped in running:
            stepped.result()
        if running:
            for copies in self._copies.values():
                copies.make_visible()


class OffloadedStep(BackendStep):
    """Steps a fused group on the host. `run` returns before it is done; see `HostSteps.finish`.

    Args:
        fused_group: the parameters, on a device; its entries' states are on the host.
        host_steps: of the optimizer.
        build: builds the step of a fused group on the host.
    """

    def __init__(
        self, fused_group: FusedGroup, host_steps: HostSteps, build: Callable[[FusedGroup], BackendStep]
    ) -> None:
        super().__init__(fused_group)
        if device_copies.is_host(fused_group.device):
            raise ValueError(
                "offload_states=True keeps the states of parameters on a GPU in host memory, but a parameter is on the "
                "CPU, where its states are in any case; build the optimizer without it, or move the model first"
            )
        self._host_steps = host_steps
        self._copies = host_steps.copies(fused_group.device)
        self._buckets = [
            Bucket(fused_group, part, host_steps.next_slot(), self._copies, build)
            for part in _parts(fused_group.entries)
        ]

    def run(self, entries: range) -> None:
        """Have all entries stepped on the host, unless the step is skipped."""
        assert entries == range(len(self.fused_group.entries)), "groups are not stepped in parts here"
        if self.fused_group.skipped:
            return
        for bucket in self._buckets:
            self._host_steps.submit(bucket, self._copies)

    def square_sum(self) -> Tensor:
        """The sum of the squares of the group's gradients; FP64 scalar on their device."""
        return square_sum(self.fused_group)

    def tensor_sums(self) -> Tensor:
        """Not there: algorithms that need whole tensors are refused."""
        raise NotImplementedError


class Bucket:
    """Entries of a fused group on a device that are stepped on the host together.

    Attributes:
        slot: where they are staged.

    Args:
        group: the fused group on the device.
        part: which of its entries.
        slot: see above.
        copies: of the device.
        build: builds the step of a fused group on the host.
    """

    def __init__(
        self,
        group: FusedGroup,
        part: slice,
        slot: Slot,
        copies: DeviceCopies,
        build: Callable[[FusedGroup], BackendStep],
    ) -> None:
        self.slot = slot
        self._group, self._part = group, part
        entries, dtypes = group.entries[part], (group.spec.param_dtype, group.spec.grad_dtype)
        sizes = [entry.weight.numel() * dtype.itemsize for entry in entries for dtype in dtypes]
        starts = [0, *itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes)]
        memory = slot.memory(starts[-1] + _LINE, copies)
        staged = [
            memory[start : start + size].view(dtype).view(entry.weight.shape)
            for start, size, (entry, dtype) in zip(starts, sizes, itertools.product(entries, dtypes), strict=False)
        ]
        self._weights, self._grads = staged[::2], staged[1::2]
        self._clip_factor = memory[starts[-1] :][:4].view(torch.float32).view(())
        # A copy of the dict, since the group on the device counts the steps in it.
        on_host = [
            replace(entry, weight=weight, optimizer_state=dict(entry.optimizer_state))
            for entry, weight in zip(entries, self._weights, strict=True)
        ]
        self._on_host = FusedGroup(group.spec, torch.device("cpu"), group.sharding, on_host, scalars_on_device=False)
        self._on_host.set_gradients(self._grads, list(map(Tensor.data_ptr, self._grads)))
        self._step = build(self._on_host)

    def to_fetch(self) -> list[Pair]:
        """Take the scalars of the coming step; return what is to be copied to the host before `step`."""
        group, entries = self._group, self._group.entries[self._part]
        self._on_host.counts.copy_(group.counts[self._part])
        self._on_host.scalars.copy_(group.scalars[self._part])
        pairs = [*zip(self._weights, (entry.weight for entry in entries), strict=True)]
        pairs += (
            (host, entry.grad) for host, entry in zip(self._grads, entries, strict=True) if entry.grad is not None
        )
        if group.clip_factor is not None:
            self._on_host.clip_factor = self._clip_factor
            pairs.append((self._clip_factor, group.clip_factor))
        return pairs

    def step(self) -> list[Pair]:
        """Step what was copied to the host; return what is to be copied back."""
        self._step.run(range(len(self._weights)))
        weights = (entry.weight for entry in self._group.entries[self._part])
        return [*zip(weights, self._weights, strict=True)]


def staging_bytes(params: Iterable[Tensor]) -> int:
    """About how many bytes the staging memory of these parameters takes, with gradients of their dtypes."""
    return SLOTS * 2 * max((max(param.numel(), BUCKET_ELEMENTS) * param.itemsize for param in params), default=0)


def _parts(entries: Sequence[ParamEntry]) -> Iterator[slice]:
    """Consecutive entries of `BUCKET_ELEMENTS`, or more if the last of them is large."""
    first = elements = 0
    for k, entry in enumerate(entries):
        elements += entry.weight.numel()
        if elements >= BUCKET_ELEMENTS or k == len(entries) - 1:
            yield slice(first, k + 1)
            first, elements = k + 1, 0
