"""Records what a library does with tensors that have no values yet, to do it later with their values.

transformers splits, renames and transposes tensors when it saves a model. Run on tensors of the meta device, this takes
no memory; each file's tensors are then computed when the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Evaluate = Callable[[Mapping[str, Tensor]], Any]
"""Computes a result from the values of the sources, by name."""


class _Recorded(NamedTuple):
    """The recorded computation of a tensor without values.

    Attributes:
        tensor: the tensor on the meta device. Keeping it alive keeps its id unique.
        sources: the names of the sources that it depends on.
        evaluate: computes its value.
    """

    tensor: Tensor
    sources: frozenset[str]
    evaluate: Evaluate


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
        self.tensors = {
            name: self._record(source, frozenset([name]), itemgetter(name)) for name, source in sources.items()
        }

    def sources_of(self, tensor: Any) -> frozenset[str]:
        """The names of the sources from which `tensor` is computed; empty for other tensors and objects."""
        recorded = self._recorded.get(id(tensor))
        return frozenset() if recorded is None else recorded.sources

    def evaluate(self, tensor: Any, values: Mapping[str, Tensor]) -> Any:
        """Compute the value of `tensor` from the values of its sources; anything else is returned unchanged."""
        recorded = self._recorded.get(id(tensor))
        return tensor if recorded is None else recorded.evaluate(values)

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

        def repeat(position: int, values: Mapping[str, Tensor]) -> Any:
            own_args, own_kwargs = tree_map(partial(self.evaluate, values=values), (args, kwargs))
            return tree_leaves(func(*own_args, **own_kwargs))[position]

        leaves, structure = tree_flatten(result)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[position] = self._record(leaf, sources, partial(repeat, position))
        return tree_unflatten(leaves, structure)

    def _record(self, like: Any, sources: frozenset[str], evaluate: Evaluate) -> Tensor:
        # Not a view: libraries measure a tensor by its storage.
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self._recorded[id(tensor)] = _Recorded(tensor, sources, evaluate)
        return tensor


def _writes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
