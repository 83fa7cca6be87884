"""Bytes that training holds besides activations: counted on the tensors themselves, or on what they will be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.validation import state_dtype


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by purpose and dtype, on this rank.

    Attributes:
        parameters: number of parameters; of sharded ones those that this rank holds.
        weights: bytes of the parameters, by dtype; of quantized ones in the dtypes they are stored in, without what
            a quantizer keeps outside of parameters.
        gradients: bytes of the gradients there are, by dtype.
        state: bytes of the optimizer state there is, by dtype.
    """

    parameters: int
    weights: Counter[torch.dtype]
    gradients: Counter[torch.dtype]
    state: Counter[torch.dtype]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(map(sum, (self.weights.values(), self.gradients.values(), self.state.values())))

    def per_parameter(self) -> dict[str, float]:
        """Bytes per parameter of `weights`, `gradients` and `state`."""
        count = max(self.parameters, 1)
        return {name: sum(getattr(self, name).values()) / count for name in ("weights", "gradients", "state")}


def memory_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryUse:
    """Count what exists now: gradients exist between backward and `zero_grad`, state after the first step."""
    parameters = list(model.parameters())
    kept = (state for state in optimizer.state.values() if isinstance(state, dict))
    states = (value for state in kept for value in state.values() if isinstance(value, Tensor))
    return MemoryUse(
        sum(local_shard(p).numel() for p in parameters),
        _bytes(parameters),
        _bytes(p.grad for p in parameters if p.grad is not None),
        _bytes(states),
    )


def expected_memory(model: nn.Module, optimizer: LowPrecisionOptimizer) -> MemoryUse:
    """Count what will exist in a step: gradients of all trainable parameters, and all states. Works on meta tensors."""
    parameters = list(model.parameters())
    state: Counter[torch.dtype] = Counter()
    for elements in expected_states(optimizer).values():
        state.update({dtype: count * dtype.itemsize for dtype, count in elements.items()})
    return MemoryUse(
        sum(local_shard(p).numel() for p in parameters),
        _bytes(parameters),
        _bytes(p for p in parameters if p.requires_grad),
        state,
    )


def expected_states(optimizer: LowPrecisionOptimizer) -> dict[str, Counter[torch.dtype]]:
    """Elements by dtype of each state, by name; what a lazy state will be is known before it exists."""
    found: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for group in optimizer.param_groups:
        for param in (p for p in group["params"] if p.requires_grad or p in optimizer.state):
            for state in optimizer.stored_states(group, param.dtype):
                found[state.name][state_dtype(state.name, param.dtype, group)] += local_shard(param).numel()
    return found


def stored(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The plain tensors that `tensors` consist of on this rank: shards, and codes and scales of quantized weights."""
    for tensor in map(local_shard, tensors):
        if type(tensor.data) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            yield from stored(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _bytes(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    count: Counter[torch.dtype] = Counter()
    for tensor in stored(tensors):
        count[tensor.dtype] += tensor.numel() * tensor.element_size()
    return count
