"""Records what a library does to tensors without values, to repeat it later with the values.

transformers splits, renames and transposes tensors when it saves a model. On tensors of the meta device, this takes no
memory; each file's tensors are then computed when the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


class _Call(NamedTuple):
    """A recorded call of a function.

    Attributes:
        function: the function.
        arguments: the `(args, kwargs)` of the call.
        results: the ids of what it returned; for tensors, the ids of the tensors without values that stand for them.
    """

    function: Callable
    arguments: tuple[Any, Any]
    results: list[int]


class _Recorded(NamedTuple):
    """A tensor without values.

    Attributes:
        tensor: the tensor on the meta device. Keeping it alive keeps its id unique.
        sources: the names of the sources that it depends on.
        call: the call that computed it; None for a source.
    """

    tensor: Tensor
    sources: frozenset[str]
    call: _Call | None


class RecordedOperations(TorchFunctionMode):
    """Inside a `with` block, records the torch operations on `tensors`.

    Args:
        sources: tensors, or other objects with a `shape` and a `dtype`, by name.

    Attributes:
        tensors: for each source a tensor without values, which stands for it.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        super().__init__()
        self._recorded: dict[int, _Recorded] = {}
        self.tensors = {name: self._record(source, frozenset([name]), None) for name, source in sources.items()}

    def sources_of(self, tensor: Any) -> frozenset[str]:
        """Return the names of the sources from which `tensor` is computed; empty for other tensors and objects."""
        recorded = self._recorded.get(id(tensor))
        return frozenset() if recorded is None else recorded.sources

    def evaluate(self, tensors: Iterable[Tensor], values: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the values of `tensors` from the values of their sources; other tensors are returned unchanged.

        Each operation runs once, even if several tensors depend on it.
        """
        known: dict[int, Any] = {id(self.tensors[name]): value for name, value in values.items()}
        return [self._value(tensor, known) for tensor in tensors]

    def _value(self, tensor: Any, known: dict[int, Any]) -> Any:
        """Evaluate one tensor, or any other object; `known` are the values so far, by the ids of their tensors."""
        if id(tensor) in self._recorded and id(tensor) not in known:
            call = self._recorded[id(tensor)].call
            assert call is not None, "the value of a source is missing"
            args, kwargs = tree_map(partial(self._value, known=known), call.arguments)
            known.update(zip(call.results, tree_leaves(call.function(*args, **kwargs)), strict=True))
        return known.get(id(tensor), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = frozenset[str]().union(*map(self.sources_of, tree_leaves((args, kwargs))))
        if sources and _writes_in_place(func, kwargs):
            raise NotImplementedError(
                f"{func.__name__} changes a tensor in place while a model is saved; hf_lowprec cannot record this"
            )
        result = func(*args, **kwargs)
        if not sources:
            return result
        leaves, structure = tree_flatten(result)
        call = _Call(func, (args, kwargs), [])
        leaves = [self._record(leaf, sources, call) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call.results.extend(map(id, leaves))
        return tree_unflatten(leaves, structure)

    def _record(self, like: Any, sources: frozenset[str], call: _Call | None) -> Tensor:
        # Not a view: libraries measure a tensor by its storage.
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self._recorded[id(tensor)] = _Recorded(tensor, sources, call)
        return tensor


def _writes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
