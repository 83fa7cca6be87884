"""Clipping by the global gradient norm, inside the step: the norm takes one pass over the gradients, the factor none.

Squares are summed in FP64, so the norm, rounded to FP32 at the end, does not depend on how tensors are cut: a sharded
run clips by the same factor as an unsharded one. (Summed in one FP32 variable, as `torch.linalg.vector_norm` does on a
CPU, the norm of 2²⁴ numbers is off by 6e-4.)
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.shards import local

PIECE = 1 << 16
"""Elements that are widened at a time; they stay in a core's cache."""


def square_sum(batch: Batch) -> Tensor:
    """The sum of the squares of a batch's gradients with torch's own operations; FP64 scalar on the batch's device."""
    total = torch.zeros((), dtype=torch.float64, device=batch.device)
    for work in batch.works:
        assert work.grad is not None
        flat = work.grad.view(-1)
        for piece in flat.split(PIECE) if flat.numel() > PIECE else (flat,):
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


_VERSION = operator.attrgetter("_version")


class Found(Enum):
    """How the gradients of now compare with those of which a norm was taken."""

    SAME = "the same tensors, not written to since"
    PART = "some of them, not written to since; the others are gone"
    NONE = "other tensors"
    CHANGED = "some of them written to since, or new ones besides them"
    SHARED = "the same views, in whose memory something was written; DDP's buckets hold several gradients"


class GradientNorm:
    """The norm of certain gradients, which it tells from others without keeping them alive.

    `torch.nn.utils.clip_grad_norm_` rewrites the gradients, so clipping ends with them. What clips in the coming step
    must end with them, too. Versions tell of every write but one through `.data`.

    Attributes:
        norm: FP32 scalar.
        captured: whether it was computed for a CUDA graph.
    """

    def __init__(self, norm: Tensor, captured: bool, grads: Sequence[Tensor]) -> None:
        self.norm = norm
        self.captured = captured
        self._grads = list(map(weakref.ref, grads))
        self._versions = _versions(grads)

    def compare(self, grads: Sequence[Tensor]) -> Found:
        """Whether `grads` are the gradients whose norm this is."""
        before, versions = [grad() for grad in self._grads], _versions(grads)
        if len(before) == len(grads) and all(map(operator.is_, before, grads)) and versions == self._versions:
            return Found.SAME
        known = {id(grad): version for grad, version in zip(before, self._versions, strict=True) if grad is not None}
        there = [id(grad) in known for grad in grads]
        if not any(there):
            return Found.NONE
        written = [grad for grad, version in zip(grads, versions, strict=True) if known.get(id(grad)) != version]
        if not written:
            return Found.PART
        return Found.SHARED if all(there) and all(grad._is_view() for grad in written) else Found.CHANGED


def _versions(grads: Sequence[Tensor]) -> list[Any]:
    """How often each gradient was written to; FSDP2 adds to the local tensor, which has a count of its own."""
    try:
        if set(map(type, grads)) <= {Tensor}:
            return list(map(_VERSION, grads))
        return [(grad._version, local(grad)._version) for grad in grads]
    except RuntimeError:  # torch does not count the writes to a tensor that was made in inference mode
        return [None if grad.is_inference() else (grad._version, local(grad)._version) for grad in grads]
