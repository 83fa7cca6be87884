"""Clipping by the global gradient norm inside the step: the norm takes one pass over the gradients, clipping none.

Squares are summed in FP64, or in pairs of FP32 numbers as precisely (`backends/triton/handwritten_kernels.py`), so the
norm, rounded to FP32 at the end, does not depend on sharding: a sharded run clips by the same factor as an unsharded
one. (Summed in one FP32 variable, as `torch.linalg.vector_norm` does on a CPU, the norm of 2²⁴ numbers is off by 6e-4.)

A norm is computed by `clip_grad_norm_`, by `global_grad_norm`, or by the step itself if it needs one and neither was
called. `GradientClipping` holds what the first two computed until a step takes the gradients. `DelayedClipping`, for
gradients that never exist all at once, clips by the norm of the step before.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.private_torch_apis import local_tensors, without_grad, without_torch_function
from hf_lowprec.optim.sharding import Sharding, local_shard, sum_over_shards
from hf_lowprec.optim.step.backend_step import BackendStep

ALTERNATIVES = (
    "use StableAdamW, which clips each tensor's update by itself, or clip='delayed', which clips by the norm of the "
    "step before"
)
"""The alternatives to clipping by the norm of all gradients."""

# torch's result would need the clipped part of a gradient, but after a backward pass, only its sum with the new part is
# left, whether or not the clipped part was zeroed in place before.
GRADIENTS_CHANGED = (
    "gradients were changed or added after clip_grad_norm_. Clipping happens inside the step, so earlier and later "
    "gradients can no longer be told apart. Call clip_grad_norm_ last; or use torch.nn.utils.clip_grad_norm_, which "
    "scales the gradients at once; or call optimizer.zero_grad() to drop the clipping"
)


Squares = tuple[Sharding | None, Tensor]
"""How gradients are sharded, and the sum of the squares of this rank's part of them, an FP64 scalar."""


def global_norm(squares: Iterable[Squares]) -> Tensor:
    """Return the norm of all gradients, over all groups and shards; FP32 scalar.

    It is on the device of the first group, or on the CPU if there are no groups. A number in one replica of a shard
    that is not finite reaches all ranks over which other gradients are sharded, so they skip a step together.
    """
    sums: dict[tuple[Sharding | None, torch.device], Tensor] = {}
    for sharding, part in squares:
        key = sharding, part.device
        sums[key] = sums[key] + part if key in sums else part
    if not sums:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    spread: Tensor | None = None
    for sharding, device in sorted(sums, key=_count_of_shards):
        part = sums[sharding, device]
        sums[sharding, device] = sum_over_shards(part if spread is None else part + spread.to(device), sharding)
        if sharding is not None:
            spread = 0 * sums[sharding, device]  # NaN, or nothing
    first, *others = sums.values()
    return torch.stack([first, *(part.to(first.device) for part in others)]).sum().sqrt().float()


def _count_of_shards(key: tuple[Sharding | None, torch.device]) -> int:
    sharding, _ = key
    return 1 if sharding is None else math.prod(sharding.mesh.size(dim) for dim in sharding.mesh_dims)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the FP32 factor that scales gradients of norm `norm` to `max_norm`, as torch's `clip_grad_norm_` does."""
    limit = max_norm if isinstance(max_norm, Tensor) else float(max_norm)  # torch refuses fractions and large integers
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _gradients_of(optimizer: Any) -> list[Tensor]:
    with without_torch_function():
        return [grad for grad in map(optimizer.gradient_of, params_of(optimizer)) if grad is not None]


def _has_views(grads: Sequence[Tensor]) -> bool:
    with without_torch_function():
        return any(map(Tensor._is_view, grads))


def _replace_bucket_views(params: Iterable[Tensor]) -> None:
    """Replace every gradient that is a view with another view of the same memory, before it is clipped.

    DDP keeps the views of its buckets (`gradient_as_bucket_view=True`) and hands them out again after `zero_grad()`.
    After the replacement, new gradients are other objects than the clipped ones, and `PendingClip` can tell them apart.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad._is_view():
            param.grad = grad.view_as(grad)


class GradientClipping:
    """The clipping of an optimizer's coming step by the norm of its gradients, and its count of skipped steps.

    Attributes:
        pending: what `clip_grad_norm_` or `global_grad_norm` computed for the present gradients; None if neither was
            called for them.
        given: the norm of all gradients, FP32 scalar, if a step takes some of them at a time; see
            `LowPrecisionOptimizer.begin_step_of_parts`.
        skipped_steps: number of steps skipped by `skip_nonfinite`, int64 scalar on the norm's device; None before the
            first step that could be skipped.
        norm_before: gradient norm of the step before, if the next one is clipped by it; 0 clips nothing.
    """

    def __init__(self, norm_before: Tensor | float = 0.0) -> None:
        self.pending: PendingClip | None = None
        self.given: Tensor | None = None
        self.skipped_steps: Tensor | None = None
        self.norm_before = norm_before

    def limit(self, optimizer: Any, requested: float | None = None) -> float | None:
        """Return the norm to which the coming step of `optimizer` clips gradients; None if it does not clip.

        Args:
            optimizer: the optimizer, whose `max_grad_norm` applies if `clip_grad_norm_` was not called.
            requested: the norm that a running call of `clip_grad_norm_` asks for, after earlier calls.
        """
        smallest = _smallest(requested, self.pending)
        limit: float | None = optimizer.max_grad_norm if smallest is None else smallest
        return None if limit == math.inf else limit

    def match(self, optimizer: Any) -> None:
        """Discard `pending` if it belongs to gradients other than the present ones of `optimizer`.

        Raises:
            RuntimeError: gradients to clip were written to, or others were added.
        """
        if self.pending is not None and not self.pending.applies_to(_gradients_of(optimizer)):
            self.pending = None

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> Tensor:
        """Clip the coming step; return the norm before it, see `LowPrecisionOptimizer.clip_grad_norm_`."""
        return self.compute_norm(optimizer, max_norm).norm_before

    @without_grad
    def compute_norm(self, optimizer: Any, max_norm: float | None) -> PendingClip:
        """Compute the norm of the gradients, for `clip_grad_norm_` and `global_grad_norm`, and set `pending`.

        Args:
            optimizer: the optimizer with the gradients.
            max_norm: the norm to which to clip them; infinity or None does not clip.

        Raises:
            RuntimeError: gradients were written to after `clip_grad_norm_`. `pending` is left unchanged.
        """
        optimizer.gradients.gather()
        self.match(optimizer)
        grads = _gradients_of(optimizer)
        is_clipped = self.pending is not None and self.pending.limit is not None
        if max_norm is not None and not is_clipped and _has_views(grads):
            _replace_bucket_views(params_of(optimizer))
            grads = _gradients_of(optimizer)
        with optimizer.plan_norm(clipped=self.limit(optimizer, max_norm) is not None) as plan:
            self.pending = PendingClip(grads, self._verified_norm(plan.backend_steps), max_norm, self.pending)
        return self.pending

    def _verified_norm(self, backend_steps: Sequence[BackendStep]) -> Tensor:
        """Compute the norm of all gradients, and raise an error if it shows that clipped gradients were written to."""
        norm = global_norm((step.fused_group.sharding, step.square_sum()) for step in backend_steps)
        if self.pending is not None and self.pending.unverified:
            self.pending.verify(norm)
        return norm

    def clip_step(self, optimizer: Any, backend_steps: Sequence[BackendStep]) -> Tensor | None:
        """Set the clip factor of the coming step and, with `skip_nonfinite`, whether it is taken.

        It is called after `match`, when the groups have their gradients.

        Returns:
            The norm of the gradients, FP32 scalar; None if the step needs none.

        Raises:
            RuntimeError: gradients were written to after `clip_grad_norm_`.
        """
        limit, known = self.limit(optimizer), self.pending
        if limit is None and not optimizer.skip_nonfinite:
            return None
        if self.given is not None:
            norm, known = self.given, None
        else:
            norm = self._verified_norm(backend_steps) if known is None or known.unverified else known.norm
        if limit is not None:
            factor = None if known is None else known.factor
            if factor is None:
                factor = clip_factor(norm, limit)
            for step in backend_steps:
                step.fused_group.clip_factor = factor.to(step.fused_group.device)
        if optimizer.skip_nonfinite:
            for step in backend_steps:
                step.fused_group.enabled = norm.isfinite().to(step.fused_group.device)
        return norm

    def step_taken(self, optimizer: Any, norm: Tensor | None) -> None:
        """Note that the step was taken, or skipped; `norm` is what `clip_step` returned."""
        optimizer.grad_norm = norm
        if self.pending is not None:
            self.pending.taken = True
        if norm is not None and optimizer.skip_nonfinite:
            if self.skipped_steps is None:
                self.skipped_steps = torch.zeros((), dtype=torch.int64, device=norm.device)
            self.skipped_steps += ~norm.isfinite()


class DelayedClipping(GradientClipping):
    """Clips by the norm of the step before, for released gradients, which never exist all at once.

    The squares of every bucket are added up in FP64, in the order of the backward pass.
    """

    def begin_step(self) -> None:
        """Forget the buckets that have been stepped since the last step ended."""
        self._squares: list[Squares] = []
        self._norm: Tensor | None = None

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> Tensor:
        """Step the remaining parameters, and return the norm of all gradients before clipping.

        Raises:
            RuntimeError: the optimizer does not clip by the norm of the step before.
            ValueError: `max_norm` is not the norm to which it clips.
        """
        if optimizer.clip != "delayed":
            raise RuntimeError(
                f"clip_grad_norm_({max_norm!r}): gradient_release=True frees gradients during the backward pass, so "
                f"the norm of all gradients is known only after most parameters are stepped: {ALTERNATIVES}; with "
                "Trainer, set max_grad_norm=0"
            )
        if max_norm not in (math.inf, optimizer.max_grad_norm):
            raise ValueError(
                f"clip_grad_norm_({max_norm!r}) was called after parameters were stepped with "
                f"max_grad_norm={optimizer.max_grad_norm!r}; set optimizer.max_grad_norm before the backward pass"
            )
        optimizer.gradients.step_rest()
        return self.norm()

    def clip_step(self, optimizer: Any, backend_steps: Sequence[BackendStep]) -> Tensor | None:
        """Set the clip factors of a bucket's groups, and add up their squares. Return None: the norm is not known."""
        if (limit := self.limit(optimizer)) is None:
            return None
        for step in backend_steps:
            group = step.fused_group
            norm = torch.as_tensor(self.norm_before, dtype=torch.float32, device=group.device)
            group.clip_factor = clip_factor(norm, limit)
            self._squares.append((group.sharding, step.square_sum()))
        return None

    def norm(self) -> Tensor:
        """Return the norm, over all shards, of the running step's gradients before clipping, after the last bucket.

        If parameters are sharded, this is a collective: all ranks must call it.
        """
        if self._norm is None and self._squares:
            # Threads of several devices have no fixed order.
            self._norm = global_norm(sorted(self._squares, key=lambda squares: str(squares[1].device)))
        return global_norm([]) if self._norm is None else self._norm


class PendingClip:
    """The norm of a set of gradients, and how the step that takes them clips.

    `torch.nn.utils.clip_grad_norm_` scales the gradients, so its clipping ends with them; so does this one. Gradients
    are identified by weak references, and writes to them by torch's version counters, which writes through `.data` do
    not change.

    Attributes:
        limit: the smallest requested norm; infinity does not clip. None means that only the norm was requested.
        norm: the norm before clipping, FP32 scalar.
        norm_before: the norm before the latest call and after earlier ones, FP32 scalar.
        factor: the factor of all calls together, FP32 scalar; None if none clips.
        taken: whether a step was taken with it. Another step with the same gradients clips as well; gradients that were
            written to after a step are new ones.
        unverified: whether versions cannot show if the gradients changed, so that the step must compute the norm again.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        norm: Tensor,
        max_norm: float | None,
        earlier: PendingClip | None,
    ) -> None:
        """Clip `grads`, whose norm is `norm`, to `max_norm` (None does not clip), after the clipping of `earlier`."""
        self._grads = list(map(weakref.ref, grads))
        self._versions = write_counts(grads)
        self.taken = False
        self.unverified = False
        self.limit = _smallest(max_norm, earlier)
        self.norm: Tensor = norm
        self.norm_before: Tensor = norm
        self.factor: Tensor | None = None if earlier is None else earlier.factor
        if self.factor is not None:
            self.factor = self.factor.to(norm.device)
            # A deleted gradient may have made it NaN, which `skip_nonfinite` reads from the norm.
            self.norm = torch.where(self.factor.isnan(), self.factor, norm)
            self.norm_before = norm * self.factor
        if max_norm is not None and max_norm != math.inf:
            factor = clip_factor(self.norm_before, max_norm)
            self.factor = factor if self.factor is None else self.factor * factor

    def applies_to(self, grads: Sequence[Tensor]) -> bool:
        """Return whether `grads` are the same gradients or, if they are clipped, the remaining ones of them.

        Gradients that were zeroed in place need no factor, whatever they were.

        Raises:
            RuntimeError: they are clipped, and were written to, or others were added since.
        """
        clipped, versions = [grad() for grad in self._grads], write_counts(grads)
        if len(clipped) == len(grads) and all(map(operator.is_, clipped, grads)) and versions == self._versions:
            return True
        version_of = {
            id(grad): version for grad, version in zip(clipped, self._versions, strict=True) if grad is not None
        }
        if self.limit is None or not any(id(grad) in version_of for grad in grads):
            return False  # not clipped, or none of them is left
        changed = [grad for grad, version in zip(grads, versions, strict=True) if version_of.get(id(grad)) != version]
        if not changed:
            return True  # some are gone, the others are unchanged
        if self.factor is None or self.taken:
            return False  # nothing was scaled, or the step was taken: these are new gradients
        if all(id(grad) in version_of and grad._is_view() for grad in changed):
            self.unverified = True  # DDP's buckets hold several gradients, which share their version
            return True
        nonzero = [grad for grad in changed if local_shard(grad).any()]
        if len(changed) == len(grads) and not any(id(grad) in version_of for grad in nonzero):
            return False  # all were zeroed, and new ones may have been added
        if nonzero:
            raise RuntimeError(GRADIENTS_CHANGED)
        return True

    def verify(self, norm: Tensor) -> None:
        """Raise RuntimeError unless `norm`, computed again, has the bits of `self.norm`; so NaN equals itself.

        A norm of zero belongs to gradients that were zeroed: nothing is left to clip.
        """
        new, old = (each.to(norm.device).view(torch.int32) for each in (norm, self.norm))
        if torch.equal(new, old):
            return
        if norm:
            raise RuntimeError(GRADIENTS_CHANGED)
        self.factor = None


def _smallest(max_norm: float | None, earlier: PendingClip | None) -> float | None:
    """Return the smaller of `max_norm` and the limit of `earlier`; None if there is neither."""
    if earlier is None or earlier.limit is None:
        return max_norm
    return earlier.limit if max_norm is None else min(max_norm, earlier.limit)


_VERSION = operator.attrgetter("_version")


def write_counts(grads: Sequence[Tensor]) -> list[Any]:
    """Return the counts of writes to each gradient; FSDP2 adds to the local tensor, which has its own count."""
    try:
        if set(map(type, grads)) <= {Tensor}:
            return list(map(_VERSION, grads))
        with without_torch_function():
            return list(zip(map(_VERSION, grads), map(_VERSION, local_tensors(grads)), strict=True))
    except RuntimeError:  # torch does not count the writes to a tensor that was made in inference mode
        return [None if grad.is_inference() else (grad._version, local_shard(grad)._version) for grad in grads]
