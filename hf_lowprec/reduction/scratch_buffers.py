"""Temporary memory that reductions reuse instead of allocating it for every bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScratchBuffers:
    """Flat tensors by name, dtype and device. Each grows to the largest size requested and is never freed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, count: int, like: Tensor) -> Tensor:
        """The first `count` elements of a buffer, uninitialized and valid until the next request of that name.

        Args:
            name: distinguishes buffers that are in use at the same time.
            count: number of elements.
            like: a tensor of the dtype and on the device of the buffer.
        """
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = like.new_empty(count)
        return buffer[:count]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_buffers": {}}  # contents are temporary
