"""A byte-level transformer that trains several seeds at once: every parameter has a first dimension for them.

Seeds have weights and data of their own and share nothing, as separate models would: their losses are summed, and AdamW
steps each element by itself. So a step of ten seeds takes little more time than a step of one, whose operations are
too small to keep a processor busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The size of a model.

    Attributes:
        width: elements of a hidden state.
        layers: blocks.
        heads: attention heads per block.
        length: bytes per sequence.
    """

    width: int = 32
    layers: int = 3
    heads: int = 4
    length: int = 32

    def parameters(self) -> int:
        """The number of parameters of one seed."""
        block = 4 * self.width**2 + 3 * self.width * 3 * self.width + 2 * self.width
        return (BYTES + self.length) * self.width + self.layers * block + self.width


class ReplicaLinear(nn.Module):
    """`nn.Linear` without bias for each seed. Input of shape (seeds, rows, inputs)."""

    def __init__(self, seeds: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(seeds, outputs, inputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.bmm(hidden, self.weight.mT)


class ReplicaRMSNorm(nn.Module):
    """`nn.RMSNorm` for each seed; its name makes `cast_model` keep it in FP32."""

    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(seeds, 1, width))

    def forward(self, hidden: Tensor) -> Tensor:
        values = hidden.float()
        normal = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)
        return (normal * self.weight).to(hidden.dtype)


class Block(nn.Module):
    """Attention, and a gated layer three times as wide."""

    def __init__(self, seeds: int, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.norm = (ReplicaRMSNorm(seeds, width) for _ in range(2))
        self.qkv, self.out = ReplicaLinear(seeds, width, 3 * width), ReplicaLinear(seeds, width, width)
        self.up, self.down = ReplicaLinear(seeds, width, 6 * width), ReplicaLinear(seeds, 3 * width, width)
        self.register_buffer("mask", torch.full((shape.length, shape.length), -torch.inf).triu(1), persistent=False)

    def forward(self, hidden: Tensor, length: int) -> Tensor:
        seeds, rows, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(-1, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT).float() * (width // self.heads) ** -0.5
        weights = scores.add(self.mask).softmax(-1).to(value.dtype)
        hidden = hidden + self.out((weights @ value).transpose(1, 2).reshape(seeds, rows, width))
        values, gates = self.up(self.norm(hidden)).chunk(2, -1)
        return hidden + self.down(values * F.silu(gates))


class Replicas(nn.Module):
    """The model, with tied embeddings.

    Args:
        seeds: of the initial weights, one for each replica.
        shape: the size.
    """

    def __init__(self, seeds: Sequence[int], shape: Shape) -> None:
        super().__init__()
        count, width = len(seeds), shape.width
        self.length = shape.length
        self.table = nn.Parameter(torch.empty(count, BYTES, width))
        self.places = nn.Parameter(torch.empty(count, shape.length, width))
        self.blocks = nn.ModuleList(Block(count, shape) for _ in range(shape.layers))
        self.norm = ReplicaRMSNorm(count, width)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        with torch.no_grad():
            for name, param in self.named_parameters():
                if "norm" not in name:
                    scale = 0.05 if name in ("table", "places") else param.shape[-1] ** -0.5
                    for replica, generator in zip(param, generators, strict=True):
                        replica.normal_(0, scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (seeds, sequences × length, bytes) for tokens of shape (seeds, sequences, length)."""
        seeds, sequences, length = tokens.shape
        offsets = BYTES * torch.arange(seeds, device=tokens.device).view(-1, 1, 1)
        hidden = F.embedding(tokens + offsets, self.table.flatten(0, 1)) + self.places[:, None]
        hidden = hidden.view(seeds, sequences * length, -1)
        for block in self.blocks:
            hidden = block(hidden, length)
        return torch.bmm(self.norm(hidden), self.table.mT)

    def losses(self, sequences: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte of each seed, FP32; `sequences` has one more byte than the length."""
        logits = self(sequences[..., :-1]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), sequences[..., 1:].flatten(), reduction="none")
        return losses.view(len(sequences), -1).mean(1)
