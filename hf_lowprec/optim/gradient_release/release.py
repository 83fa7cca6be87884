"""Gradient release: step parameters during the backward pass and free their gradients.

`collector.py` collects parameters whose gradients are final. A full bucket is stepped like a model of its own, in at
most two launches per spec, and its gradients are freed; `optimizer.step()` steps the rest. A step of some parameters
has the bits of the ordinary step, because random bits depend on a parameter's number, its step count and the element
alone.

What needs all gradients at once is excluded: clipping by their norm (see `DelayedClipping`), `skip_nonfinite`, loss
scaling. So are micro-batches: their gradients would have to be accumulated first. They cannot be
accumulated in the moments instead: Σgᵢ² is not (Σgᵢ)², so every second moment would be that of smaller batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.gradient_release.collector import GradientCollector
from hf_lowprec.optim.gradient_release.delayed_clipping import DelayedClipping
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.step_plan import StepPlan

ALTERNATIVES = (
    "use StableAdamW, which clips each tensor's update by itself, or clip='delayed', which clips by the norm of the "
    "step before"
)
"""The alternatives to clipping by the norm of all gradients."""

_NEEDS_ALL = (
    "gradient_release=True frees gradients during the backward pass, so the norm of all gradients is known only after "
    f"most parameters are stepped: {ALTERNATIVES}"
)


class ReleasingOptimizer(Protocol):
    """The interface of a `LowPrecisionOptimizer` that its `GradientRelease` uses."""

    param_groups: list[ParamGroup]
    clip: str
    max_grad_norm: float | None

    def check_gradient_release(self) -> None:
        """Raise ValueError if a group is unsupported, or attributes have been set that gradient release excludes."""

    def step_part(self, params: Iterable[Tensor], earlier: StepPlan | None) -> StepPlan:
        """Step some parameters and free their gradients."""


class GradientRelease(GradientCollector):
    """Steps the parameters of an optimizer as soon as their gradients are final.

    Attributes:
        clipping: clips by the norm of the step before, if the optimizer was built with `clip="delayed"`.

    Args:
        optimizer: the optimizer. It is referenced weakly; when it is deleted, the hooks are removed.
    """

    argument = "gradient_release=True"
    accumulates = False
    _without_that = f"stepped other parameters without that. To clip, {ALTERNATIVES}"

    def __init__(self, optimizer: ReleasingOptimizer) -> None:
        self.clipping = DelayedClipping()
        self._plans: dict[tuple[Any, int], StepPlan] = {}
        super().__init__(optimizer)

    def start(self) -> None:
        super().start()
        self.resume(float(self.clipping.norm_before))

    def end_step(self) -> Tensor | None:
        """Step the parameters that have a gradient and were not stepped during the backward pass, and end the step.

        Returns:
            The norm of all gradients before clipping, FP32 scalar; None without `clip="delayed"`.

        Raises:
            RuntimeError: a stepped parameter was given another gradient, or settings were changed since.
        """
        with self._lock:
            self._take_rest()
            stepped = self._running.taken
            norm = self.clipping.end_step() if self._optimizer.clip == "delayed" and stepped else None
            self._begin_step()
            self.watch_parameters()
        return norm

    def norm_for_clipping(self, max_norm: float) -> Tensor:
        """The norm of all gradients before clipping, for `clip_grad_norm_`. Steps the parameters that are left.

        Raises:
            RuntimeError: the optimizer does not clip by the norm of the step before.
            ValueError: `max_norm` is not the norm to which it clips.
        """
        optimizer = self._optimizer
        if optimizer.clip != "delayed":
            raise RuntimeError(f"clip_grad_norm_({max_norm!r}): {_NEEDS_ALL}; with Trainer, set max_grad_norm=0")
        if max_norm not in (math.inf, optimizer.max_grad_norm):
            raise ValueError(
                f"clip_grad_norm_({max_norm!r}) comes after parameters were stepped with "
                f"max_grad_norm={optimizer.max_grad_norm!r}; set optimizer.max_grad_norm before the backward pass"
            )
        with self._lock:
            self._take_rest()
            return self.clipping.norm()

    def resume(self, norm_before: float) -> None:
        """Start a step of which no parameter has been stepped yet, because states were loaded.

        Args:
            norm_before: the gradient norm of their last step, by which `clip="delayed"` clips the next one.
        """
        with self._lock:
            self._begin_step()
            self.clipping.resume(norm_before)
            self.watch_parameters()

    def check_between_steps(self, call: str) -> None:
        """Raise RuntimeError if parameters have been stepped since the last `step()`.

        Args:
            call: what was asked for, for the message.
        """
        if self._running.taken:
            raise RuntimeError(
                f"{call} between the backward pass and step(): gradient_release=True has stepped "
                f"{len(self._running.taken)} of {sum(1 for _ in self.params())} parameters, and not the others. "
                "Do it after step()"
            )

    def _begin_step(self) -> None:
        super()._begin_step()
        self._buckets: Counter[Any] = Counter()  # how many have been stepped, by `bucket_key`
        self._settings_at_start: list[dict[str, Any]] | None = None

    def _take_rest(self) -> None:
        super()._take_rest()
        if self._settings_at_start not in (None, self._settings()):
            raise RuntimeError(
                "the learning rate or another setting of a param group was changed between the backward pass and "
                "step(), but gradient_release=True has stepped parameters with the former ones; change settings before "
                "the backward pass"
            )

    @without_grad
    def _take(self, key: Any, bucket: Sequence[Tensor]) -> None:
        """Step the parameters of `bucket`, and free their gradients."""
        optimizer = self._optimizer
        if self._settings_at_start is None:
            optimizer.check_gradient_release()
            self._settings_at_start = self._settings()
        slot = key, self._buckets[key]  # its plan fits if the backward pass has the order of the last one
        with interrupts.deferred():  # what was stepped is noted before a signal can raise
            self._plans[slot] = optimizer.step_part(bucket, self._plans.get(slot))
            self._buckets[key] += 1
            self._running.taken.update(map(id, bucket))

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of the param groups, as values that can be compared."""
        return [
            {
                key: (id(value), value._version) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def _second_gradient(self, param: Tensor) -> str:
        return (
            f"{self._name(param)} got a second gradient since the last step(), but gradient_release=True steps "
            "parameters with their first one. Call step() after every backward pass: gradients of micro-batches cannot "
            "be accumulated (the second moment of a sum is not the sum of second moments). For larger batches, use "
            "gradient checkpointing, or build the optimizer without gradient_release. If a backward pass was "
            "interrupted or ran out of memory, finish its step before you continue: call zero_grad() and step(), or "
            "Trainer.train(). If another optimizer trains this model now, remove this one's hooks: call its "
            "zero_grad(), step() and stop_gradient_release(), or delete it"
        )


def gradient_release_of(optimizer: Any) -> GradientRelease | None:
    """The gradient release of an optimizer, which may be of another library; None if `step` steps all parameters."""
    release = getattr(optimizer, "release", None)
    return release if isinstance(release, GradientRelease) else None
