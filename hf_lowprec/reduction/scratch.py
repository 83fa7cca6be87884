"""Memory that reductions use again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Flat tensors by name, which grow to the largest size asked for and stay."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, count: int, like: Tensor) -> Tensor:
        """`count` elements of `like`'s dtype on its device; their contents are temporary."""
        key = (name, like.dtype, like.device)
        held = self._tensors.get(key)
        if held is None or held.numel() < count:
            held = self._tensors[key] = like.new_empty(count)
        return held[:count]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensors": {}}  # contents are temporary
