"""Gradient release: step parameters during the backward pass and free their gradients.

A full bucket is stepped like a separate model, in at most two launches per spec, and its gradients are freed;
`optimizer.step()` steps the rest. A step of some parameters has the bits of the ordinary step, because random bits
depend only on a parameter's number, its step count and the element.

Features that need all gradients at once are excluded: clipping by their norm (see `DelayedClipping`), `skip_nonfinite`,
loss scaling. So are micro-batches: their gradients would have to be accumulated first. The moments cannot accumulate
them instead: Σgᵢ² is not (Σgᵢ)², so every second moment would be a smaller batch's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_lowprec.optim.arguments import check_execution_arguments
from hf_lowprec.optim.gradients.collector import GradientCollector
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.clipping import ALTERNATIVES
from hf_lowprec.optim.step.step_plan import StepPlan


class GradientRelease(GradientCollector):
    """Steps the parameters of an optimizer as soon as their gradients are final. `DelayedClipping` clips, if at all."""

    argument = "gradient_release=True"
    accumulates = False
    stepped_in_parts = True
    _without_that = f"already stepped other parameters. To clip, {ALTERNATIVES}"

    def __init__(self, optimizer: Any) -> None:
        self._plans: dict[tuple[Any, int], StepPlan] = {}
        super().__init__(optimizer)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._optimizer.clipping.begin_step()
        self._stepped_buckets: Counter[Any] = Counter()  # how many, by `bucket_key`
        self._settings_at_start: list[dict[str, Any]] | None = None

    def gather(self) -> None:
        raise RuntimeError(
            "gradient_release=True steps parameters during the backward pass, so the norm of all gradients is never "
            "known before a step; with clip='delayed', optimizer.grad_norm is that of the last step"
        )

    def step_rest(self) -> None:
        """Step the parameters that have a gradient and were not stepped during the backward pass.

        Raises:
            RuntimeError: a stepped parameter got another gradient, or settings were changed since it was stepped.
        """
        with self._lock:
            self._take_rest()
        if self._settings_at_start not in (None, self._settings()):
            raise RuntimeError(
                "the learning rate or another setting of a param group was changed between the backward pass and "
                "step(), but gradient_release=True has stepped parameters with the old ones; change settings before "
                "the backward pass"
            )

    def end_step(self) -> None:
        self.step_rest()
        optimizer, clipping = self._optimizer, self._optimizer.clipping
        optimizer.grad_norm = None
        if optimizer.clip == "delayed" and self._taken:
            optimizer.grad_norm = clipping.norm_before = clipping.norm()
        self.begin_anew()
        optimizer.finish_host_steps()

    def zero(self, set_to_none: bool) -> None:
        """Forget the gradients of parameters that have not been stepped."""
        with self._lock:
            for bucket in self._waiting.values():
                for param in bucket.take(len(bucket.params)):
                    self._versions.pop(param, None)
            self.watch_parameters()

    def states_were_loaded(self) -> None:
        self.begin_anew()

    def check_between_steps(self, call: str) -> None:
        if self._taken:
            raise RuntimeError(
                f"{call} came between the backward pass and step(), when gradient_release=True had stepped only "
                f"{len(self._taken)} of {len(self.params())} parameters; call step() first"
            )

    def _before_final(self, param: Tensor) -> None:
        if param in self._versions:
            raise RuntimeError(self._second_gradient(param))

    @without_grad
    def _take(self, key: Any, params: Sequence[Tensor]) -> None:
        """Step `params`, and free their gradients."""
        optimizer = self._optimizer
        for param in params:
            self._check_version(param)
        if self._settings_at_start is None:
            optimizer.check_groups()
            check_execution_arguments(optimizer)
            self._settings_at_start = self._settings()
        slot = key, self._stepped_buckets[key]  # its plan fits if the backward pass has the same order as the last one
        with interrupts.deferred():  # note what was stepped before a signal can raise
            self._plans[slot] = optimizer.step_part(params, self._plans.get(slot))
            self._stepped_buckets[key] += 1
            self._taken.update(params)

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings of the param groups, as values that can be compared."""
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
