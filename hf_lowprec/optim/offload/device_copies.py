"""Copies between a device and the host, on two streams of their own, so that they overlap with computation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""A target, and the source that is copied to it; of one shape and dtype."""


def is_host(device: torch.device) -> bool:
    """Return whether tensors on `device` are in host memory already."""
    return device.type == "cpu"


class DeviceCopies:
    """Copies of one device, a GPU or another one whose module in torch has streams.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._to_host, self._to_device = (self._module.Stream(device=device) for _ in range(2))

    def host_memory(self, size: int) -> Tensor:
        """Memory on the host from which and to which copies are asynchronous; uint8 of shape (size)."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def fetch(self, pairs: Iterable[Pair]) -> Any:
        """Copy from the device once what the current stream has been given so far is computed.

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
        """Copy to the device; returns an event for `wait`, after which sources may be written to."""
        with self._module.device(self._device), self._module.stream(self._to_device):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._to_device.record_event()

    def wait(self, event: Any) -> None:
        """Wait on the host for an event."""
        event.synchronize()

    def order_after(self, event: Any) -> None:
        """Let the current stream wait for an event, so that what it computes from now on may write to the sources."""
        self._module.current_stream(self._device).wait_event(event)

    def make_visible(self) -> None:
        """Let the current stream wait for all copies to the device so far."""
        self._module.current_stream(self._device).wait_stream(self._to_device)
