"""Facts that one pass counts over a stored tensor, and over an earlier version of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS

CHUNK = 1 << 20
"""Elements that are converted to FP32 at a time."""


class TensorFacts(NamedTuple):
    """A stored tensor in numbers. The last four compare it with an earlier version, if there is one.

    Attributes:
        shape: its shape.
        dtype: the dtype in which it is stored, to which the earlier version is rounded.
        nonfinite: number of NaNs and infinities.
        at_start: whether all elements are exactly 1, or exactly 0 as in biases and norms that multiply by `1 + weight`.
        lost: number of elements that an update of the learning rate leaves as they are, rounded to nearest.
        moved: number of elements that differ; None without an earlier version.
        distance: the sum of the squares of the differences.
        norm: the sum of the squares of the earlier elements.
        exponents: number of elements that stayed and that moved, for each exponent field of FP32 before they moved.
    """

    shape: torch.Size
    dtype: torch.dtype
    nonfinite: int
    at_start: bool
    lost: int
    moved: int | None
    distance: float
    norm: float
    exponents: Tensor


@torch.no_grad()
def tensor_facts(tensor: Tensor, rate: float, earlier: Tensor | None = None) -> TensorFacts:
    """Count what is in a floating-point tensor.

    Args:
        tensor: the tensor.
        rate: the size of an update.
        earlier: an earlier version of it, of the same shape.
    """
    ones = zeros = nonfinite = lost = moved = 0
    distance = norm = 0.0
    counts = torch.zeros(2, EXPONENTS, dtype=torch.int64)
    for start in range(0, tensor.numel(), CHUNK):
        chunk = tensor.reshape(-1)[start : start + CHUNK]
        values = chunk.float()
        ones += int((values == 1).sum())
        zeros += int((values == 0).sum())
        nonfinite += int((~values.isfinite()).sum())
        lost += int(((values + rate).to(tensor.dtype) == chunk).sum())
        if earlier is None:
            continue
        before = earlier.reshape(-1)[start : start + CHUNK].to(tensor.dtype)
        changed, old = before != chunk, before.float()
        moved += int(changed.sum())
        distance += float((values - old).square().sum())
        norm += float(old.square().sum())
        exponents = (old.view(torch.int32) >> 23) & 0xFF
        counts += torch.bincount(exponents + EXPONENTS * changed, minlength=2 * EXPONENTS).view(2, EXPONENTS)
    at_start = tensor.numel() > 0 and tensor.numel() in (ones, zeros)
    compared = None if earlier is None else moved
    return TensorFacts(tensor.shape, tensor.dtype, nonfinite, at_start, lost, compared, distance, norm, counts)
