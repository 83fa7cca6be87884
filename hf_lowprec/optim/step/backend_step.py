"""The interface between a step and the backends: what a backend does for one fused group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.matrix_tiles import MatrixSums

CHUNK = 1 << 16
"""The number of elements converted to FP64 at a time; they stay in a core's cache."""

_DEVICE_CHUNK = 1 << 24
"""The same on other devices, where each operation takes a launch."""


class BackendStep(ABC):
    """One backend's step of one fused group, with the kernel and the tables that it keeps between steps.

    `backends/selection.py` builds one per fused group, before anything is changed; building it raises an error if the
    backend cannot run here. The methods are called while the group has gradients and computed scalars.

    Attributes:
        fused_group: the group to step.
    """

    def __init__(self, fused_group: FusedGroup) -> None:
        self.fused_group = fused_group

    @abstractmethod
    def run(self, entries: range) -> None:
        """Step some consecutive entries of the group in place, unless `fused_group.enabled` is false."""

    def square_sum(self) -> Tensor:
        """Return the sum of the squares of the group's gradients on this rank; FP64 scalar on its device."""
        grads = (entry.grad for entry in self.fused_group.entries if entry.grad is not None)
        return square_sum_of(grads, self.fused_group.device)

    @abstractmethod
    def tensor_sums(self) -> Tensor:
        """Return the sums of `spec.tensor_means` over this rank's part of each entry: FP64, (entries, means)."""

    def matrix_sums(self) -> dict[int, MatrixSums]:
        """Return the sums of `spec.factored` over rows and columns of this rank's parts of entries, by position.

        torch computes the sums of missing entries.
        """
        return {}

    def load_tables(self) -> None:  # noqa: B027  # `eager` has none
        """Make this step's tables before any group is stepped, so that `run` allocates nothing.

        It is not called for groups that orthogonalize, whose addresses are not known yet.
        """

    def release_tables(self) -> None:  # noqa: B027
        """Release this step's tables: at the end of the step, or because addresses in them have changed."""


def square_sum_of(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of contiguous tensors on `device`; FP64 scalar there."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    for grad in grads:
        flat = grad.view(-1)
        for chunk in flat.split(size) if flat.numel() > size else (flat,):
            values = chunk.double()
            total += torch.dot(values, values)
    return total
