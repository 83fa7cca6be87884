"""Copies to and from a device that is only simulated: they are late, as those of a GPU may be, and in any order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hf_lowprec.optim import host_steps
from hf_lowprec.optim.host_steps import DeviceCopies, Pair

GARBAGE = 0xFF
"""Every byte of memory that has not been written to: NaN, or -1."""


@dataclass
class Event:
    """Copies of one call, and whether they are done."""

    copies: list[Callable[[], None]]
    done: bool = False


@dataclass
class _Stream:
    events: deque[Event] = field(default_factory=deque)

    def run_until(self, event: Event | None = None) -> None:
        """Run the copies in their order, until `event` is done; None runs all."""
        while self.events and not (event and event.done):
            first = self.events.popleft()
            for copy in first.copies:
                copy()
            first.done = True


class SimulatedCopies(DeviceCopies):
    """Copies of a device whose tensors are on the CPU.

    A copy is made when it is waited for at the latest, and between two calls at any time. Until then, its target holds
    garbage on the host, and old weights on the device. Sources that are freed earlier are kept, as a GPU's allocator
    does.

    Args:
        share: the share of calls, besides those that wait, in which each stream makes its first copies; 0 is as late as
            possible, and 1 at once.
        seed: of the random choices.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share, self._random = share, random.Random(seed)
        self._to_host, self._to_device = _Stream(), _Stream()
        self._lock = threading.RLock()
        self.fetched = self.sent = self.allocated = 0
        self.calls: list[str] = []
        self.before_call: Callable[[str], None] = lambda name: None

    def host_memory(self, size: int) -> Tensor:
        self.allocated += size
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def fetch(self, pairs: Iterable[Pair]) -> Event:
        return self._enqueue("fetch", self._to_host, pairs)

    def send(self, pairs: Iterable[Pair]) -> Event:
        return self._enqueue("send", self._to_device, pairs)

    def order_after(self, event: Event) -> None:
        self.wait(event)

    def wait(self, event: Event) -> None:
        with self._lock:
            self._called("wait")
            for stream in (self._to_host, self._to_device):
                if event in stream.events:
                    stream.run_until(event)

    def make_visible(self) -> None:
        with self._lock:
            self._called("make_visible")
            self._to_device.run_until()

    def _enqueue(self, name: str, stream: _Stream, pairs: Iterable[Pair]) -> Event:
        with self._lock:
            self._called(name)
            event = Event([])
            for target, source in pairs:
                assert target.shape == source.shape and target.dtype == source.dtype
                if name == "fetch":
                    target.reshape(-1).view(torch.uint8).fill_(GARBAGE)
                    self.fetched += source.nbytes
                else:
                    self.sent += source.nbytes
                event.copies.append(_copy(target, source))
            stream.events.append(event)
            if self._share == 1:
                stream.run_until(event)
            return event

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.before_call(name)
        for stream in (self._to_host, self._to_device):
            if stream.events and self._random.random() < self._share:
                stream.run_until(stream.events[0])


def simulate_device(patch: pytest.MonkeyPatch, share: float = 0.5, seed: int = 0) -> SimulatedCopies:
    """Treat the CPU as a device; returns its copies."""
    copies = SimulatedCopies(share, seed)
    patch.setattr(host_steps, "is_host", lambda device: False)
    patch.setattr(host_steps, "DeviceCopies", lambda device: copies)
    return copies


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            target.copy_(source)

    return copy
