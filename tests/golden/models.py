"""A model whose gradients are exactly what it is told, so that a reduction and a step over it have exact inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.golden.exact import Shape, digest, integers, weights
from tests.support.processes.shards import gathered

MICRO_BATCHES = 4


class Scale(nn.Module):
    """Adds `sum(weight * factor)` to its input: the gradient of the weight is `factor`, times a power of two."""

    def __init__(self, shape: Shape, key: int) -> None:
        super().__init__()
        values = weights(shape, key)
        # Without low bits, compensations and remainders start at zero.
        self.weight = nn.Parameter(values if isinstance(self, ScaleRMSNorm) else values.bfloat16().float())
        self.factor = torch.zeros(shape)

    def forward(self, value: Tensor) -> Tensor:
        return value + (self.weight * self.factor.to(self.weight.dtype)).float().sum()


class ScaleRMSNorm(Scale):
    """One that `cast_model` leaves in FP32 for its name."""


class Scales(nn.Module):
    """Layers of odd sizes, with norms between them."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [(Scale, (33, 7)), (ScaleRMSNorm, (13,)), (Scale, (5,)), (ScaleRMSNorm, (1,)), (Scale, (3, 4, 5))]
        self.layers = nn.ModuleList(kind(shape, key) for key, (kind, shape) in enumerate(kinds))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value

    def give_factors(self, matrices: bool, step: int, micro_batch: int, rank: int) -> None:
        """Factors of one backward: the first micro-batch has large ones, the next far smaller ones.

        Sums over micro-batches and ranks do not fit in BF16, so it shows where they are rounded. After the divisions by
        four micro-batches and two ranks they are multiples of 2**-16 below 4, so their squares have exact sums in FP64.

        Args:
            matrices: for Muon, only what is no matrix differs between elements; see `exact.orthogonal_gradient`.
        """
        for key, layer in enumerate(self.layers):
            shape = tuple(layer.factor.shape)
            scale = 2.0 ** -(6 if micro_batch == 0 else 10 + micro_batch)
            if matrices and len(shape) in (2, 3):
                # One element of each matrix, so that it is orthogonal whatever the sums are rounded to.
                layer.factor = torch.zeros(shape)
                layer.factor[..., 1, 2] = (64 + float(integers((), 100 * step + 10 * micro_batch + rank, 60))) * scale
            else:
                drawn = integers(shape, 1000 * step + 100 * micro_batch + 10 * rank + key, 127)
                layer.factor = drawn.float() * scale


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of weights and states, for BF16 layers and FP32 norms; of the full tensors, if they are sharded."""
    kinds: dict[str, list[Tensor]] = {}
    for layer in model.layers:
        label = "norm" if isinstance(layer, ScaleRMSNorm) else "bf16"
        for kind, value in {"weight": layer.weight, **optimizer.state[layer.weight]}.items():
            kinds.setdefault(f"{label} {kind}", []).append(gathered(value.detach()))
    return {kind: digest(values) for kind, values in kinds.items()}
