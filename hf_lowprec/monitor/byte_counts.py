"""Count the bytes of weights, gradients and optimizer state: existing tensors, or those that a step will need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.gradients.buckets import gradients_alive
from hf_lowprec.optim.gradients.collector import collector_of
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.states import state_tensors, stays_in_bf16


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by purpose and dtype, on this rank.

    Attributes:
        parameters: number of parameters; for sharded parameters, the number of elements on this rank.
        weights: bytes of the parameters, by dtype. Quantized parameters count in their storage dtypes; tensors that a
            quantizer keeps outside parameters are not included.
        gradients: bytes of the gradients, by dtype.
        state: bytes of the optimizer state, by dtype.
    """

    parameters: int
    weights: Counter[torch.dtype]
    gradients: Counter[torch.dtype]
    state: Counter[torch.dtype]

    @classmethod
    def of(cls, parameters: list[Tensor], gradients: Iterable[Tensor], state: Counter[torch.dtype]) -> MemoryUse:
        """Count these parameters, gradients as large as the tensors `gradients`, and `state`."""
        return cls(sum(local_shard(p).numel() for p in parameters), _bytes(parameters), _bytes(gradients), state)

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(map(sum, (self.weights.values(), self.gradients.values(), self.state.values())))


def expected_memory(model: nn.Module, optimizer: LowPrecisionOptimizer) -> MemoryUse:
    """Count the tensors that a step will need: gradients of all trainable parameters, and all states.

    With gradient release, only gradients that exist at the same time count, if the last parameters' are final first.
    Parameters may be on the meta device.
    """
    parameters: list[Tensor] = list(model.parameters())
    state: Counter[torch.dtype] = Counter()
    for elements in expected_states(optimizer).values():
        state.update({dtype: count * dtype.itemsize for dtype, count in elements.items()})
    return MemoryUse.of(parameters, expected_gradients(parameters, optimizer), state)


def expected_gradients(params: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the `params` of the model whose gradients will exist at the same time."""
    trainable = [param for param in params if param.requires_grad]
    return gradients_alive(reversed(trainable)) if collector_of(optimizer) else trainable


def expected_states(optimizer: LowPrecisionOptimizer) -> dict[str, Counter[torch.dtype]]:
    """Count elements by name of the state tensor and by dtype, existing ones and those that the first step will create.

    Raises:
        ValueError: states are stored in 8 bits, and the sharding of a parameter cuts blocks.
    """
    elements: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for group, param in _with_states(optimizer):
        shape = local_shard(param).shape
        for state in state_tensors(optimizer, group, param):
            elements[state.name][state.dtype] += state.shape_for(shape).numel()
    return elements


def elements_kept_in_bf16(optimizer: LowPrecisionOptimizer) -> Counter[str]:
    """Count elements of states that are stored in BF16 although 8 bits were requested, by reason."""
    elements: Counter[str] = Counter()
    for group, param in _with_states(optimizer):
        for reason in stays_in_bf16(optimizer, group, param):
            elements[reason] += local_shard(param).numel()
    return elements


def _with_states(optimizer: LowPrecisionOptimizer) -> Iterator[tuple[ParamGroup, Tensor]]:
    """Yield each parameter that has states or will have some, after its param group."""
    for group in optimizer.param_groups:
        yield from ((group, param) for param in group["params"] if param.requires_grad or param in optimizer.state)


def storage_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the plain tensors in which `tensors` are stored on this rank: shards, quantized data and its scales."""
    for tensor in tensors:
        tensor = local_shard(getattr(tensor, "ds_tensor", tensor))  # DeepSpeed's ZeRO 3 leaves the parameter empty
        if type(tensor.data) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            yield from storage_tensors(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _bytes(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    count: Counter[torch.dtype] = Counter()
    for tensor in storage_tensors(tensors):
        count[tensor.dtype] += tensor.numel() * tensor.element_size()
    return count
