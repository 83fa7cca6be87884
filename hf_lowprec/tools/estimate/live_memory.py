"""Count the bytes of the tensors that code holds at once, on any device; on the meta device, nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """As a context manager, counts the tensors that are created inside, while they exist.

    Memory counts once, however many tensors share it. What kernels allocate for themselves is not seen: the scratch
    memory of matrix products and of attention.

    Attributes:
        live: bytes that exist now, gradients excluded.
        gradients: bytes that exist now and were declared gradients by `count_as_gradient`.
        released: bytes of these gradients that gradient release would have freed by now; set by others.
        peak: the largest `live` so far.
        peak_with_gradients: the largest sum of `live` and `gradients` so far.
        peak_with_release: the largest such sum without what was released.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = self.released = 0
        self.peak = self.peak_with_gradients = self.peak_with_release = 0
        self._sizes: dict[int, int] = {}
        self._gradients: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch operation and count its results."""
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._add(storage, 0)  # if it is new here, it was made outside; results may be views of it
        results = function(*args, **kwargs)
        for storage in _storages(results):
            self._add(storage, storage.nbytes())
        return results

    def count_as_gradient(self, tensor: Tensor) -> None:
        """Move a tensor's bytes from `live` to `gradients`; nothing if they are already there or were never counted."""
        key = id(tensor.untyped_storage())
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self.live -= self._sizes[key]
            self.gradients += self._sizes[key]

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            with_gradients = self.live + self.gradients
            self.peak_with_gradients = max(self.peak_with_gradients, with_gradients)
            self.peak_with_release = max(self.peak_with_release, with_gradients - self.released)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._gradients.remove(key)
            self.gradients -= size
        else:
            self.live -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
