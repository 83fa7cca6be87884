"""Normalization layers that are defined here, and classes that are only named like one."""

import torch
from torch import nn

from tests.support.models.inspection import FP32


class FrozenBatchNorm2d(nn.Module):
    weight: torch.Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ScaleRMSNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        assert x.dtype == FP32 and (gate is None or gate.dtype == FP32)
        return self.weight * x if gate is None else self.weight * x * gate


class ScaleRMSNormGated(ScaleRMSNorm):
    pass


class ScaleLayerNorm2d(ScaleRMSNorm):
    pass


class Derived(ScaleRMSNorm):
    pass


class LayerNormPerHead(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(n), nn.LayerNorm(n)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[1](self.norms[0](x))


class EncoderStableLayerNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(n)
        self.dense = nn.Linear(n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.layer_norm(x))


class PreLayerNormModel(nn.Linear):
    pass


NORMS = ("ScaleRMSNorm", "ScaleRMSNormGated", "ScaleLayerNorm2d", "Derived", "FrozenBatchNorm2d", "LayerNormPerHead")
"""Those that are norms."""
