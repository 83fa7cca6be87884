"""Clipping by the global gradient norm, inside the step: the norm takes one pass over the gradients, the factor none.

Squares are summed in FP64, so the norm, rounded to FP32 at the end, does not depend on how tensors are cut: a sharded
run clips by the same factor as an unsharded one. (Summed in one FP32 variable, as `torch.linalg.vector_norm` does on a
CPU, the norm of 2²⁴ numbers is off by 6e-4.)
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.backends import triton as launch
from hf_lowprec.optim.sharding import local
from hf_lowprec.optim.step.fused_group import FusedGroup

PIECE = 1 << 16
"""Elements that are widened at a time; they stay in a core's cache."""


def square_sum(fused_group: FusedGroup) -> Tensor:
    """The sum of the squares of a fused_group's gradients with torch's own operations; FP64 scalar on the fused_group's device."""
    total = torch.zeros((), dtype=torch.float64, device=fused_group.device)
    for entry in fused_group.entries:
        assert entry.grad is not None
        flat = entry.grad.view(-1)
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


def give_own_views(params: Iterable[Tensor]) -> None:
    """Replace every gradient that is a view by another view of the same memory.

    DDP keeps the views of its buckets (`gradient_as_bucket_view=True`), and gives them to parameters anew after
    `zero_grad()`. So new gradients are other objects than those that are clipped, which stay the same while they last.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad._is_view():
            param.grad = grad.view_as(grad)


_VERSION = operator.attrgetter("_version")


# Torch's result would need the clipped part of a gradient, and after a backward only its sum with the new part is left,
# whether or not the clipped part was zeroed in place before.
GRADIENTS_CHANGED = (
    "gradients were changed or added after clip_grad_norm_. Clipping happens inside the step, so earlier and later "
    "gradients can no longer be told apart. Call clip_grad_norm_ last; or use torch.nn.utils.clip_grad_norm_, which "
    "scales the gradients at once; or call optimizer.zero_grad() to drop the clipping"
)


class PendingClip:
    """The norm of a set of gradients, identified by weak references, and what it does to the coming step.

    `torch.nn.utils.clip_grad_norm_` scales the gradients, so its clipping ends with them. This ends with them, too.
    Versions tell of writes. Writes through `.data` are not seen.

    Attributes:
        norm: FP32 scalar; None until it is computed.
        captured: whether it was computed for a CUDA graph.
        limit: the smallest norm to which gradients are clipped; infinity does not clip. None: only the norm was wanted.
        factor: by which gradients are clipped, FP32 scalar; None if they are not.
        expected: the norm that gradients must still have where versions cannot tell whether they changed.
        taken: whether a step was taken with it; another step with the same gradients is clipped as well, and gradients
            that were written to after it are new ones.
    """

    def __init__(self, grads: Sequence[Tensor], earlier: PendingClip | None, max_norm: float | None) -> None:
        """Begin with `grads`, to which `earlier` applies, and clip by `max_norm` after it."""
        limits = (max_norm, None if earlier is None else earlier.limit)
        self.limit: float | None = min((limit for limit in limits if limit is not None), default=None)
        self.factor: Tensor | None = None if earlier is None else earlier.factor
        self.expected: Tensor | None = None if earlier is None else earlier.expected
        self.norm: Tensor | None = None
        self.captured = False
        self.taken = False
        self._max_norm = max_norm
        self._grads = list(map(weakref.ref, grads))
        self._versions = _versions(grads)

    def finish(self, norm: Tensor, captured: bool) -> Tensor:
        """Take the norm of the gradients.

        Returns:
            The norm after the clipping of before.
        """
        self.norm, self.captured, self.expected = norm, captured, None
        if self.factor is not None:
            self.factor = self.factor.to(norm.device)
            # A gradient that is gone may have made it NaN, which `skip_nonfinite` reads from the norm.
            self.norm = torch.where(self.factor.isnan(), self.factor, norm)
            norm = norm * self.factor
        if self._max_norm is not None and self._max_norm != math.inf:
            factor = clip_factor(norm, self._max_norm)
            self.factor = factor if self.factor is None else self.factor * factor
        return norm

    def applies_to(self, grads: Sequence[Tensor]) -> bool:
        """Whether `grads` are the same gradients, or, if they are clipped, what is left of them.

        Those that were zeroed in place need no factor, whatever they were.

        Raises:
            RuntimeError: they are clipped, and were written to or joined by others since.
        """
        before, versions = [grad() for grad in self._grads], _versions(grads)
        if len(before) == len(grads) and all(map(operator.is_, before, grads)) and versions == self._versions:
            return True
        known = {id(grad): version for grad, version in zip(before, self._versions, strict=True) if grad is not None}
        if self.limit is None or not any(id(grad) in known for grad in grads):
            return False
        written = [grad for grad, version in zip(grads, versions, strict=True) if known.get(id(grad)) != version]
        if not written or self.factor is None or self.taken:
            return not written
        if all(id(grad) in known and grad._is_view() for grad in written):
            self.expected = self.norm  # DDP's buckets hold several gradients, which share their version
            return True
        # A graph that is captured cannot ask.
        nonzero = written if launch.capturing() else [grad for grad in written if local(grad).any()]
        if len(written) == len(grads) and not any(id(grad) in known for grad in nonzero):
            return False
        if nonzero:
            raise RuntimeError(GRADIENTS_CHANGED)
        return True

    def check(self, norm: Tensor) -> None:
        """Raise RuntimeError unless `norm`, which was computed anew, is the one that is expected; NaN is itself.

        Of gradients that were zeroed it is zero, and there is nothing to clip.
        """
        bits = [each.to(norm.device).view(torch.int32) for each in (norm, self.expected) if each is not None]
        if torch.equal(bits[0], bits[-1]):
            return
        if norm:
            raise RuntimeError(GRADIENTS_CHANGED)
        self.factor = None


def _versions(grads: Sequence[Tensor]) -> list[Any]:
    """How often each gradient was written to; FSDP2 adds to the local tensor, which has a count of its own."""
    try:
        if set(map(type, grads)) <= {Tensor}:
            return list(map(_VERSION, grads))
        return [(grad._version, local(grad)._version) for grad in grads]
    except RuntimeError:  # torch does not count the writes to a tensor that was made in inference mode
        return [None if grad.is_inference() else (grad._version, local(grad)._version) for grad in grads]
