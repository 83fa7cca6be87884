"""Bytes per parameter of weights, gradients and states, counted on the tensors that exist after a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hf_lowprec.monitor.byte_counts import storage_tensors

SHAPES = ((512, 1024),) * 8


def held(params: Sequence[Parameter], optimizer: Optimizer) -> float:
    """Bytes per parameter of parameters, their gradients and the states of their optimizer."""
    tensors = [*params, *(param.grad for param in params), *_tensors(optimizer.state)]
    # Memory that tensors share, such as a table of values, is counted once.
    sizes = {part.data_ptr(): part.nbytes for part in storage_tensors(tensors)}
    return sum(sizes.values()) / sum(param.numel() for param in params)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
