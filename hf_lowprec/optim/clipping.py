"""Clipping by the global gradient norm, inside the step: the norm takes one pass over the gradients, the factor none.

Squares are summed in FP64, so the norm, rounded to FP32 at the end, does not depend on how tensors are cut: a sharded
run clips by the same factor as an unsharded one. (Summed in one FP32 variable, as `torch.linalg.vector_norm` does on a
CPU, the norm of 2²⁴ numbers is off by 6e-4.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_lowprec.optim.batch import Batch

PIECE = 1 << 16
"""Elements that are widened at a time; they stay in a core's cache."""


def square_sum(batch: Batch) -> Tensor:
    """The sum of the squares of a batch's gradients with torch's own operations; FP64 scalar on the batch's device."""
    total = torch.zeros((), dtype=torch.float64, device=batch.device)
    for work in batch.works:
        assert work.grad is not None
        for piece in work.grad.view(-1).split(PIECE):
            values = piece.double()
            total += torch.dot(values, values)
    return total


def global_norm(square_sums: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients from the square sums of their parts, wherever these are; FP32 scalar.

    It lies on the device of the first part, and on the CPU if there is none.
    """
    if not square_sums:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.stack([part.to(square_sums[0].device) for part in square_sums]).sum().sqrt().float()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The FP32 factor that brings gradients of norm `norm` down to `max_norm`, as `torch.nn.utils.clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
