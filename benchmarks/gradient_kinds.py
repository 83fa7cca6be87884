"""Gradients that a step meets in training, other than random ones: zeros, subnormal numbers, views of a bucket.

Zeros are those of rows of an embedding whose tokens have never been seen, and of experts that have never been given a
token, so both moments are zero as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import Parameter

Shapes = list[tuple[int, ...]]
SIZE = 0.01
"""Standard deviation of ordinary gradients."""


def shapes(vocabulary: int, hidden: int, experts: int, intermediate: int) -> Shapes:
    """An embedding, and a stack of experts' matrices."""
    return [(vocabulary, hidden), (experts, intermediate, hidden)]


def give_gradients(params: list[Parameter], kind: str) -> float:
    """Give parameters gradients of a kind of `KINDS`.

    Returns:
        The share of the elements that differ from random ones: that are zero or subnormal, or in a misaligned tensor.
    """
    for param in params:
        param.grad = torch.randn_like(param).mul_(SIZE)
    return KINDS[kind](params) / sum(param.numel() for param in params)


def _random(params: list[Parameter]) -> int:
    return 0


def _zeros(params: list[Parameter], dimensions: int, one_in: int) -> int:
    """Zeros in all but one in `one_in` rows, or matrices, of parameters with so many dimensions."""
    count = 0
    for grad in (param.grad for param in params if param.ndim == dimensions):
        assert grad is not None
        grad[torch.arange(len(grad), device=grad.device) % one_in != 0] = 0.0
        count += int((grad == 0).sum())
    return count


def _small(params: list[Parameter], exponent: int) -> int:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(2.0**exponent)
    return sum(param.numel() for param in params)


def _views_of_a_bucket(params: list[Parameter], offset: int) -> int:
    """One after the other in one tensor, `offset` elements after its start, as by DDP's `gradient_as_bucket_view`."""
    bucket = torch.empty(
        offset + sum(param.numel() for param in params), dtype=params[0].dtype, device=params[0].device
    )
    for param in params:
        assert param.grad is not None
        param.grad = bucket[offset : offset + param.numel()].view(param.shape).copy_(param.grad)
        offset += param.numel()
    return sum(param.numel() for param in params if param.grad is not None and param.grad.data_ptr() % 16)


RANDOM = "random"
KINDS: dict[str, Callable[[list[Parameter]], int]] = {
    RANDOM: _random,
    "rows not seen": partial(_zeros, dimensions=2, one_in=16),
    "experts without tokens": partial(_zeros, dimensions=3, one_in=4),
    "subnormal second moments": partial(_small, exponent=-57),
    "subnormal gradients": partial(_small, exponent=-123),
    "2 bytes into a bucket": partial(_views_of_a_bucket, offset=1),
    "4 bytes into a bucket": partial(_views_of_a_bucket, offset=2),
    "8 bytes into a bucket": partial(_views_of_a_bucket, offset=4),
}
"""Bytes are those of 16-bit gradients; for FP32, they are twice as many."""
