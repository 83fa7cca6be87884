"""The parameter shapes that are stepped, and weights and gradients of ordinary size for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Llama:
    """The sizes that decide the shapes of a Llama's parameters; the embedding is the head, too."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int

    @property
    def shapes(self) -> Shapes:
        """In the order of `model.parameters()`."""
        keys = self.hidden // self.heads * self.key_heads
        square = (self.hidden, self.hidden)
        layer: Shapes = [square, (keys, self.hidden), (keys, self.hidden), square]
        layer += [(self.intermediate, self.hidden)] * 2 + [(self.hidden, self.intermediate)] + [(self.hidden,)] * 2
        return [(self.vocabulary, self.hidden), *layer * self.layers, (self.hidden,)]

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(map(math.prod, self.shapes))


LLAMA_1B = Llama("Llama-3.2-1B", 128256, 2048, 8192, 16, 32, 8)
# For rehearsals, in which each operation of the kernel may be interpreted.
TINY = Llama("tiny Llama", 100, 32, 48, 1, 4, 2)


def parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Weights and gradients; drawn in `dtype`, so that no wider copy of them is ever in memory."""
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device).mul_(0.02)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(0.01)
    return params
