"""Steps on the host for parameters on a device.

Parameters are stepped bucket by bucket: weights and gradients of a bucket are copied to the host, unless gradients are
there already (`gradients/offload.py`). A thread steps them there with an ordinary CPU backend, and the new weights are
copied back. Meanwhile, the device computes, for example the rest of the backward pass, and the next bucket is copied. A
few buckets share the host's staging memory in turn.

The states never leave the host. Once `finish` has returned, a parameter's states and its weight belong to the same
step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.gradients import buckets
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.fused_group import FusedGroup

BUCKET_ELEMENTS = 1 << 24
"""The largest number of elements of a bucket, unless a single tensor is larger."""
SLOTS = 3
"""The number of buckets on the host at once: one is fetched, one is stepped, and one is sent back."""
_LINE = 64

Pair = tuple[Tensor, Tensor]
"""A target, and the source that is copied to it, with the same shape and dtype."""


def is_host(device: torch.device) -> bool:
    """Return whether tensors on `device` are in host memory already."""
    return device.type == "cpu"


class DeviceCopies:
    """Copies between the host and a device, on two separate streams, so that they overlap with computation.

    The device is a GPU, or another device whose torch module has streams.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._to_host, self._to_device = (self._module.Stream(device=device) for _ in range(2))

    def host_memory(self, size: int) -> Tensor:
        """Allocate host memory for asynchronous copies in both directions; uint8 of shape (size)."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def fetch(self, pairs: Iterable[Pair]) -> Any:
        """Copy from the device once the current stream has finished its work so far.

        Returns:
            An event for `wait`. Sources may be freed at once, and targets may be read after it.
        """
        self._to_host.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._to_host):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._to_host)
            return self._to_host.record_event()

    def send(self, pairs: Iterable[Pair]) -> Any:
        """Copy to the device, and return an event for `wait`, after which sources may be written to."""
        with self._module.device(self._device), self._module.stream(self._to_device):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._to_device.record_event()

    def wait(self, event: Any) -> None:
        """Wait on the host for an event."""
        event.synchronize()

    def order_after(self, event: Any) -> None:
        """Let the current stream wait for an event, so that its later work may write to the sources."""
        self._module.current_stream(self._device).wait_event(event)

    def make_visible(self) -> None:
        """Let the current stream wait for all copies to the device so far."""
        self._module.current_stream(self._device).wait_stream(self._to_device)


class Slot:
    """Staging memory of one bucket at a time.

    Attributes:
        done: the work on the current bucket; its result is the event after which the weights are sent.
    """

    def __init__(self) -> None:
        self.done: Future[Any] | None = None
        self._memory: Tensor | None = None

    def tensors(self, layouts: Sequence[tuple[torch.dtype, torch.Size]], copies: DeviceCopies) -> list[Tensor]:
        """Return tensors of these dtypes and shapes in the slot's memory, which grows if necessary."""
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in layouts]
        starts = [0, *itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes)]
        needed, memory = starts[-2] + sizes[-1], self._memory
        if memory is None or memory.numel() < needed:
            memory = self._memory = copies.host_memory(_rounded(needed))
        return [
            memory[start : start + size].view(dtype).view(shape)
            for start, size, (dtype, shape) in zip(starts, sizes, layouts, strict=False)
        ]


class HostSteps:
    """One optimizer's thread that steps buckets on the host, and its staging memory."""

    def __init__(self) -> None:
        self._slots = itertools.cycle([Slot() for _ in range(SLOTS)])
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._running: list[Future[Any]] = []

    def copies(self, device: torch.device) -> DeviceCopies:
        """Return the copies to and from `device`."""
        if device not in self._copies:
            self._copies[device] = DeviceCopies(device)
        return self._copies[device]

    def next_slot(self) -> Slot:
        """Return the slot of the next bucket."""
        return next(self._slots)

    def submit(
        self, copies: DeviceCopies, slot: Slot, to_fetch: Iterable[Pair], work: Callable[[], Iterable[Pair]]
    ) -> Any:
        """Copy to the host, run `work` in the thread, and copy back what it returns.

        Args:
            copies: the copies to and from the device.
            slot: the staging memory to use, once the work on its current bucket is done.
            to_fetch: what is copied to the host.
            work: called in the thread; returns what is copied to the device.

        Returns:
            The event after which everything is on the host.

        Raises:
            RuntimeError: the work on the slot's earlier bucket has failed.
        """
        if slot.done is not None:
            if slot.done.exception() is not None:
                self.finish()
            copies.wait(slot.done.result())
        fetched = copies.fetch(to_fetch)

        def run() -> Any:
            copies.wait(fetched)
            with torch.no_grad():
                return copies.send(work())

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hf_lowprec steps on the host")
        slot.done = self._thread.submit(run)
        self._running.append(slot.done)
        return fetched

    def finish(self) -> None:
        """Wait until all work is done; later computations on the device see the new weights.

        Raises:
            RuntimeError: a copy or a step failed. Some buckets have been stepped, and others have not.
        """
        running, self._running = self._running, []
        wait(running)  # for all of them, even if one has failed
        for done in running:
            done.result()
        if running:
            for copies in self._copies.values():
                copies.make_visible()


class OffloadedStep(BackendStep):
    """Steps a fused group on the host, as one bucket. `run` returns before it is done; see `HostSteps.finish`.

    Args:
        fused_group: the parameters, on a device; its entries' states are on the host.
        host_steps: the optimizer's thread and staging memory.
        build: builds the step of a fused group on the host.
        gradients_on_host: whether gradients are on the host, too.
    """

    def __init__(
        self,
        fused_group: FusedGroup,
        host_steps: HostSteps,
        build: Callable[[FusedGroup], BackendStep],
        gradients_on_host: bool,
    ) -> None:
        super().__init__(fused_group)
        if is_host(fused_group.device):
            raise ValueError(
                "offload_states=True keeps the states of parameters on a GPU in host memory, but a parameter is on the "
                "CPU, where its states are in any case; build the optimizer without it, or move the model first"
            )
        self._host_steps = host_steps
        self._copies, self._slot = host_steps.copies(fused_group.device), host_steps.next_slot()
        entries, spec = fused_group.entries, fused_group.spec
        dtypes = [spec.param_dtype] if gradients_on_host else [spec.param_dtype, spec.grad_dtype]
        layouts = [(dtype, entry.weight.shape) for dtype in dtypes for entry in entries]
        staged = self._slot.tensors(layouts, self._copies)
        self._clip_factor = self._copies.host_memory(4).view(torch.float32).view(())
        self._weights, self._staged_grads = staged[: len(entries)], staged[len(entries) :]
        on_host = [entry.with_weight(weight) for entry, weight in zip(entries, self._weights, strict=True)]
        self._on_host = FusedGroup(spec, torch.device("cpu"), fused_group.sharding, on_host, scalars_on_device=False)
        self._step = build(self._on_host)

    def run(self, entries: range) -> None:
        """Step all entries on the host, unless the step is skipped."""
        assert entries == range(len(self._weights)), "groups are not stepped in parts here"
        if not self.fused_group.skipped:
            self._host_steps.submit(self._copies, self._slot, self._to_fetch(), self.step_on_host)

    def square_sum(self) -> Tensor:
        """Return the sum of the squares of the group's gradients, an FP64 scalar on their device."""
        if self._staged_grads:
            return super().square_sum()
        self._set_gradients(self._grads())
        return self._step.square_sum().to(self.fused_group.device)

    def tensor_sums(self) -> Tensor:
        """Raise an error: algorithms that need whole tensors are not supported."""
        raise NotImplementedError

    def _grads(self) -> list[Tensor]:
        return [entry.grad for entry in self.fused_group.entries if entry.grad is not None]

    def _set_gradients(self, grads: list[Tensor]) -> None:
        self._on_host.set_gradients(grads, list(map(Tensor.data_ptr, grads)))

    def _to_fetch(self) -> list[Pair]:
        """Take the gradients and scalars of the coming step; return what must be copied to the host first."""
        group, grads = self.fused_group, self._grads()
        self._on_host.counts.copy_(group.counts)
        self._on_host.scalars.copy_(group.scalars)
        pairs = [*zip(self._weights, group.weights, strict=True)]
        if self._staged_grads:
            pairs += zip(self._staged_grads, grads, strict=True)
            grads = self._staged_grads
        self._set_gradients(grads)
        if group.clip_factor is not None:
            self._on_host.clip_factor = self._clip_factor
            pairs.append((self._clip_factor, group.clip_factor))
        return pairs

    def step_on_host(self) -> list[Pair]:
        """Step what was copied to the host; return what must be copied back."""
        self._step.run(range(len(self._weights)))
        return [*zip(self.fused_group.weights, self._weights, strict=True)]


def staging_bytes(params: Iterable[Tensor], gradients_on_host: bool) -> int:
    """Return the largest size of these parameters' staging memory in bytes, with gradients of their dtypes.

    Args:
        params: the parameters.
        gradients_on_host: whether gradients are copied separately from weights.
    """
    elements = max(BUCKET_ELEMENTS, buckets.BUCKET_ELEMENTS if gradients_on_host else 0)
    largest = max((max(param.numel(), elements) * param.itemsize for param in params), default=0)
    return SLOTS * _rounded(largest if gradients_on_host else 2 * largest)


def _rounded(size: int) -> int:
    """Round up to a power of two, as torch does for pinned memory (`CachingHostAllocator.h`, `allocate`)."""
    return 1 << max(size - 1, 0).bit_length()
