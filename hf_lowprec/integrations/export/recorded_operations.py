"""Records what a library does with tensors that have no values yet, to do it later with their values.

transformers splits, renames and transposes tensors when it saves a model. Run on tensors of the meta device, this takes
no memory; each file's tensors are then computed when the file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    """Inside a `with` block, records the torch operations on the tensors that `add_source` returned."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: dict[int, _Recorded] = {}

    def add_source(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor without values that stands for the tensor `name`."""
        return self._record(shape, dtype, frozenset([name]), lambda values: values[name])

    def sources_of(self, tensor: Any) -> frozenset[str]:
        """The names of the sources from which `tensor` is computed; empty for other tensors and objects."""
        recorded = self._recorded.get(id(tensor))
        return frozenset() if recorded is None else recorded.sources

    def evaluate(self, tensor: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Compute the value of `tensor` from the values of its sources; other tensors are returned unchanged."""
        recorded = self._recorded.get(id(tensor))
        value: Tensor = tensor if recorded is None else recorded.evaluate(values)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in _leaves([args, kwargs]) if id(leaf) in self._recorded]
        if inputs and _writes_in_place(func, kwargs):
            raise NotImplementedError(
                f"{func.__name__} changes a tensor in place while a model is saved; hf_lowprec cannot record this"
            )
        result = func(*args, **kwargs)
        if not inputs:
            return result
        sources = frozenset[str]().union(*(self.sources_of(tensor) for tensor in inputs))

        def evaluate(values: Mapping[str, Tensor]) -> Any:
            return func(*self._with_values(args, values), **self._with_values(kwargs, values))

        if isinstance(result, Tensor):
            return self._record(result.shape, result.dtype, sources, evaluate)
        if isinstance(result, tuple | list) and any(isinstance(part, Tensor) for part in result):
            return tuple(
                self._record(part.shape, part.dtype, sources, lambda values, k=k: evaluate(values)[k])  # type: ignore[misc]
                for k, part in enumerate(result)
            )
        return result

    def _record(self, shape: torch.Size, dtype: torch.dtype, sources: frozenset[str], evaluate: Evaluate) -> Tensor:
        # Not a view: libraries measure a tensor by its storage.
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._recorded[id(tensor)] = _Recorded(tensor, sources, evaluate)
        return tensor

    def _with_values(self, value: Any, values: Mapping[str, Tensor]) -> Any:
        """`value`, an argument of a recorded operation, with recorded tensors replaced by their values."""
        if isinstance(value, Tensor):
            return self.evaluate(value, values)
        if isinstance(value, dict):
            return {key: self._with_values(item, values) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._with_values(item, values) for item in value)
        return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _writes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
