"""Numbers that are the same on every machine: whole numbers from a counter, times powers of two.

No number here comes from a random generator of a library, from a matrix product, or from a sum whose order matters.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

Shape = tuple[int, ...]
DIGITS = 8
"""Hexadecimal digits of a SHA-256 that are kept: two different results agree in them once in 2**32."""


def integers(shape: Shape, key: int, bound: int) -> Tensor:
    """Whole numbers in [-bound, bound], int64: a hash of `key` and each element's index.

    Only products, shifts and exclusive ors of numbers below 2**62, which int64 holds.
    """
    x = torch.arange(math.prod(shape), dtype=torch.int64) + 1000003 * (key + 1)
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = ((x ^ (x >> 15)) & 0x7FFFFFFF) * factor & 0x7FFFFFFF
    return ((x >> 7) % (2 * bound + 1) - bound).view(shape)


def weights(shape: Shape, key: int) -> Tensor:
    """Multiples of 2**-15 in (-2, 2), FP32: a cast to 16 bits rounds them."""
    return integers(shape, key, 65000).float() * 2.0**-15


@functools.cache
def gradient(shape: Shape, dtype: torch.dtype, key: int, step: int) -> Tensor:
    """Multiples of one power of two, with seven bits, which every dtype here holds.

    Sums of up to 2**38 squares are exact in FP64, so a norm does not depend on the order of its sum.
    """
    return (integers(shape, 1000 * step + key, 127).float() * 2.0 ** -(6 + 5 * step % 13)).to(dtype)


@functools.cache
def sparse_gradient(shape: Shape, dtype: torch.dtype, key: int, step: int) -> Tensor:
    """Few elements of one size, with norm `4 * 2**-e`: norms of tensors, and of four tensors, are exact in BF16."""
    numel = math.prod(shape)
    count = 16 if numel >= 16 else 4 if numel >= 4 else 1
    spread = torch.arange(count) * (numel // count)
    signs = 2 * (integers((count,), 1000 * step + key, 1000) > 0).float() - 1
    flat = torch.zeros(numel)
    flat[spread] = signs * (4 / math.isqrt(count)) * 2.0 ** -(3 + step % 5)
    return flat.view(shape).to(dtype)


@functools.cache
def orthogonal_gradient(shape: Shape, dtype: torch.dtype, key: int, step: int) -> Tensor:
    """For Muon: four elements of one size in rows and columns of their own, or one, always at the same places.

    The momentum then has that form as well. Its norm is a power of two times the size of its elements, so that what
    Newton–Schulz starts from is `±1/2`, and each product after it has one term: nothing depends on an order of sums.
    """
    count = 4 if min(shape[-2:]) >= 4 else 1
    diagonal = torch.arange(count)
    signs = 2 * (integers((count,), key, 1000) > 0).float() - 1
    found = torch.zeros(shape)
    found[..., (diagonal + key) % shape[-2], diagonal] = signs * float(integers((), step, 60) + 64) * 2.0**-8
    return found.to(dtype)


def digest(tensors: Iterable[Tensor]) -> str:
    """Of the raw bytes of `tensors`, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:DIGITS]
