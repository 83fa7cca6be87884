"""Facts that one pass over two versions of a tensor counts: which elements changed, and how far."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent
from hf_lowprec.tools.inspection.tensor_facts import CHUNK, exponents

SPACINGS_OF_DECAY = 2.0
"""An element should have changed if weight decay alone takes it this many spacings further. One would not do: under
stochastic rounding, e^-1 of such elements stay where they are by chance; of these, e^-2."""

_BIT_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    for before, after in zip(earlier.reshape(-1).split(CHUNK), later.reshape(-1).split(CHUNK), strict=True):
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
