"""Facts that one pass counts over a stored tensor, or over two versions of it: which elements changed, and how far.

Tensors are read in chunks, so that FP32 copies stay small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent

CHUNK = 1 << 16
"""Elements that are converted to FP32 at a time, so few that they stay in the cache."""
_NOT_FINITE = 255
"""The exponent field of infinities and NaNs in FP32."""
_INITIAL_VALUES = (0.0, 1.0)
SPACINGS_OF_DECAY = 2.0
"""An element should have changed if weight decay alone takes it this many spacings further. One would not do: under
stochastic rounding, e^-1 of such elements stay where they are by chance; of these, e^-2."""
_BIT_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    def at_initial_value(self) -> bool:
        """True if all elements are exactly 1, or exactly 0 as in biases and norms that multiply by `1 + weight`."""
        return self.constant in _INITIAL_VALUES

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
    for chunk in chunks(tensor):
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


class TensorChange(NamedTuple):
    """The difference between two versions of a tensor.

    Attributes:
        parameters: number of elements.
        moved: number of elements that are not the same bit for bit.
        distance: Euclidean norm of the difference.
        norm: Euclidean norm of the earlier version.
        shrunk: number of elements that weight decay alone should have changed.
        shrunk_not_moved: how many of these are the same bit for bit.
        dtype: the dtype in which they were compared.
        rounded: whether one of them was rounded for that.
        exponents: number of elements for each exponent field of FP32, as in `TensorFacts`, before they moved.
        moved_exponents: how many of these moved.
    """

    parameters: int
    moved: int
    distance: float
    norm: float
    shrunk: int
    shrunk_not_moved: int
    dtype: torch.dtype
    rounded: bool
    exponents: Tensor
    moved_exponents: Tensor

    @property
    def relative_distance(self) -> float | None:
        """The distance relative to the norm; None for a tensor that began as zero."""
        return self.distance / self.norm if self.norm else None


def tensor_change(earlier: Tensor, later: Tensor, decay: float = 0.0) -> TensorChange:
    """Compare two versions of a tensor.

    Args:
        earlier: the earlier version.
        later: the later one, of the same shape. If its dtype differs, the wider one is rounded to the narrower.
        decay: the share of each weight that weight decay takes away between the two.
    """
    dtype = _narrower(earlier.dtype, later.dtype)
    moved = shrunk = shrunk_not_moved = 0
    distance = norm = 0.0
    counts = torch.zeros(2, EXPONENTS, dtype=torch.int64)  # of elements that stayed, of elements that moved
    for before, after in zip(chunks(earlier), chunks(later), strict=True):
        before, after = before.to(dtype), after.to(dtype)
        changed = _bits(before) != _bits(after)
        moved += int(changed.sum())
        if not dtype.is_floating_point:
            continue
        values = before.float()
        exponent = exponents(values)
        counts += torch.bincount(exponent + EXPONENTS * changed.int(), minlength=2 * EXPONENTS).view(2, EXPONENTS)
        difference = after.float() - values
        distance += float(torch.dot(difference, difference))
        norm += float(torch.dot(values, values))
        if decay:
            spacing = spacings_by_exponent(dtype).float()[exponent]
            decays = values.abs() * decay >= SPACINGS_OF_DECAY * spacing
            shrunk += int(decays.sum())
            shrunk_not_moved += int((decays & ~changed).sum())
    return TensorChange(
        earlier.numel(),
        moved,
        math.sqrt(distance),
        math.sqrt(norm),
        shrunk,
        shrunk_not_moved,
        dtype,
        earlier.dtype != later.dtype,
        counts.sum(0),
        counts[1],
    )


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The floating-point dtype with fewer significant bits."""
    if one.is_floating_point and other.is_floating_point:
        return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)
    return one if one.is_floating_point else other


def _bits(values: Tensor) -> Tensor:
    if values.dtype == torch.bool or not values.dtype.is_floating_point:
        return values
    return values.contiguous().view(_BIT_PATTERNS[values.dtype.itemsize])


def exponents(values: Tensor) -> Tensor:
    """The exponent field of FP32 numbers: k for magnitudes from 2^(k-127) up to, not including, 2^(k-126)."""
    return (values.view(torch.int32) >> 23) & 0xFF


def any_nonzero(tensor: Tensor) -> bool:
    """Return whether any element is not zero."""
    return any(bool(chunk.count_nonzero()) for chunk in chunks(tensor))


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor, a few at a time."""
    return iter(tensor.detach().reshape(-1).split(CHUNK))
