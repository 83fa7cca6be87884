"""Values in a `forward`, as far as `forward_flow.py` knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Value:
    """Facts about a value in `forward`."""

    layers: frozenset[str] = frozenset()  # whose FP32 copies it is computed from
    is_16_bit: bool = False  # whether it may be a 16-bit tensor
    module: str | None = None  # the qualified name of the module that it is
    loss: str | None = None  # the name of the torch loss that it is
    tensor: str | None = None  # the qualified name of the parameter or buffer that it is

    def __or__(self, other: Value) -> Value:
        """One of two values, depending on the path taken."""
        same = self if (self.module, self.loss, self.tensor) == (other.module, other.loss, other.tensor) else Value()
        return replace(same, layers=self.layers | other.layers, is_16_bit=self.is_16_bit or other.is_16_bit)


PLAIN = Value()
"""A value without anything to follow: a number, a shape, an FP32 tensor that is no copy."""


def any_of(values: Iterable[Value]) -> Value:
    """A value that holds several others, or is one of them."""
    values = tuple(values)
    modules = {value.module for value in values if value.module is not None}
    tensors = {value.tensor for value in values if value.tensor is not None}
    return Value(
        frozenset().union(*(value.layers for value in values)),
        any(value.is_16_bit for value in values),
        module=modules.pop() if len(modules) == 1 else None,
        tensor=tensors.pop() if len(tensors) == 1 else None,
    )


def promoted(values: Sequence[Value]) -> Value:
    """The result of an elementwise operation: FP32 if an operand is certainly an FP32 copy."""
    combined = any_of(values)
    return replace(
        combined, tensor=None, is_16_bit=combined.is_16_bit and not any(v.layers and not v.is_16_bit for v in values)
    )
