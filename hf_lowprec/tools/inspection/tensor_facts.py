"""Facts that one pass over a stored tensor counts. Tensors are read in chunks, so that FP32 copies stay small."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent

CHUNK = 1 << 16
"""Elements that are converted to FP32 at a time, so few that they stay in the cache."""
_NOT_FINITE = 255
"""The exponent field of infinities and NaNs in FP32."""


class TensorFacts(NamedTuple):
    """A stored tensor in numbers.

    Attributes:
        shape: its shape.
        dtype: the dtype in which it is stored.
        ones: number of elements that are exactly 1.0.
        zeros: number of elements that are exactly 0.0.
        constant: the value of all elements, if they are equal; else None.
        square_sum: the sum of the squares of its elements.
        exponents: number of elements for each exponent field of FP32 (int64, 256 elements). Empty for integers.
    """

    shape: torch.Size
    dtype: torch.dtype
    ones: int
    zeros: int
    constant: float | None
    square_sum: float
    exponents: Tensor

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.parameters * self.dtype.itemsize

    @property
    def is_floating(self) -> bool:
        """True if it holds floating-point numbers."""
        return self.dtype.is_floating_point

    @property
    def nonfinite(self) -> int:
        """Number of NaNs and infinities."""
        return int(self.exponents[_NOT_FINITE]) if self.is_floating else 0

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.sqrt(self.square_sum / self.parameters) if self.parameters else 0.0

    def coarser_than(self, update: float) -> int:
        """The number of elements of which rounding to nearest would lose an update of this size."""
        if not self.is_floating:
            return 0
        lost = spacings_by_exponent(self.dtype) / 2 > update
        lost[_NOT_FINITE] = False
        return int(self.exponents[lost].sum())

    def movers(self, distance: float, dtype: torch.dtype) -> float:
        """The expected number of elements that change if each moves by `distance` and is stored as `dtype`."""
        if not self.is_floating:
            return 0.0
        chances = (distance / spacings_by_exponent(dtype)).clamp(max=1.0)
        return float((self.exponents * chances)[:_NOT_FINITE].sum())


def tensor_facts(tensor: Tensor) -> TensorFacts:
    """Count what is in a tensor."""
    if not tensor.dtype.is_floating_point:
        return TensorFacts(tensor.shape, tensor.dtype, 0, 0, None, 0.0, torch.zeros(0, dtype=torch.int64))
    ones = zeros = 0
    square_sum, smallest, largest = 0.0, math.inf, -math.inf
    counts = torch.zeros(EXPONENTS, dtype=torch.int64)
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        values = chunk.float()
        if not values.numel():
            continue
        ones += int((values == 1).sum())
        zeros += values.numel() - int(values.count_nonzero())
        square_sum += float(torch.dot(values, values))
        low, high = torch.aminmax(values)
        smallest, largest = min(smallest, float(low)), max(largest, float(high))
        counts += torch.bincount(exponents(values), minlength=EXPONENTS)
    constant = smallest if smallest == largest and not counts[_NOT_FINITE] else None
    return TensorFacts(tensor.shape, tensor.dtype, ones, zeros, constant, square_sum, counts)


def exponents(values: Tensor) -> Tensor:
    """The exponent field of FP32 numbers: k for magnitudes from 2^(k-127) up to, not including, 2^(k-126)."""
    return (values.view(torch.int32) >> 23) & 0xFF
