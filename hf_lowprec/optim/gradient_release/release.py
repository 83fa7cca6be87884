"""Gradient release: step parameters during the backward pass and free their gradients.

A hook on each parameter runs when its gradient is final: after autograd has added up all its uses, and after the
reduce-scatter of FSDP2, which calls the same hooks. Parameters are collected in a bucket. A full bucket is stepped like
a model of its own, in at most two launches per spec, and its gradients are freed; `optimizer.step()` steps the rest. A
step of some parameters has the bits of the ordinary step, because random bits depend on a parameter's number, its step
count and the element alone. The newest gradient always waits for the next one or for `step()`, so that code which
writes to the gradients in between, as `torch.nn.utils.clip_grad_norm_` does, finds one, and the write is noticed.

DDP runs these hooks before it averages, so its communication hook hands over the means instead: see `take_means` and
`integrations/live_models/gradient_release_under_ddp.py`.

What needs all gradients at once is excluded: clipping by their norm (see `DelayedClipping`), `skip_nonfinite`, loss
scaling, CUDA graphs. So are micro-batches: their gradients would have to be accumulated first. They cannot be
accumulated in the moments instead: Σgᵢ² is not (Σgᵢ)², so every second moment would be that of smaller batches.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.gradient_release.buckets import GradientBucket, bucket_key
from hf_lowprec.optim.gradient_release.delayed_clipping import DelayedClipping
from hf_lowprec.optim.gradient_release.hooks import GradientHooks
from hf_lowprec.optim.graph_capture import is_capturing
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import local_shard
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

    def run_first_step_checks(self) -> None:
        """Run the checks before the first step."""

    def run_first_gradient_checks(self) -> None:
        """Run the checks before the first gradient is released."""

    def step_part(self, params: Iterable[Tensor], earlier: StepPlan | None) -> StepPlan:
        """Step some parameters and free their gradients."""


class GradientRelease:
    """Steps the parameters of an optimizer as soon as their gradients are final.

    Attributes:
        clipping: clips by the norm of the step before, if the optimizer was built with `clip="delayed"`.

    Args:
        optimizer: the optimizer. It is referenced weakly; when it is deleted, the hooks are removed.
    """

    def __init__(self, optimizer: ReleasingOptimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self.clipping = DelayedClipping()
        self._running = _RunningStep()
        self._plans: dict[tuple[Any, int], StepPlan] = {}
        self._averaged_later: set[int] = set()  # identities of parameters, see `average_later`
        self._checked = self._ended_once = False
        self._hooks = GradientHooks(self.gradient_is_final)
        self._lock = threading.RLock()  # autograd has a thread per device
        self.start()

    @property
    def _optimizer(self) -> ReleasingOptimizer:
        optimizer = self._reference()
        assert optimizer is not None, "the optimizer owns this object"
        return optimizer

    def start(self) -> None:
        """Give every parameter that requires a gradient a hook. Takes parameters over from other optimizers.

        If a backward pass was interrupted, its step is over: what it has stepped stays as it is.
        """
        self._hooks.start()
        self.resume(float(self.clipping.norm_before))

    def stop(self) -> None:
        """Remove the hooks until `start` is called. `step()` then steps all parameters."""
        self._hooks.stop()

    def watch_parameters(self) -> None:
        """Give new parameters a hook, and remove the hooks of those that are gone.

        Called wherever parameters may have been added, unfrozen or replaced, as FSDP2 replaces them.
        """
        if self._hooks.watch(self._params()):
            self._checked = False

    # During the backward pass.

    def gradient_is_final(self, param: Tensor) -> None:
        """Take the gradient of `param`, and step the bucket if it is full; called by the parameter's hook.

        Raises:
            RuntimeError: it is the parameter's second gradient since the last step, or a CUDA graph is captured.
        """
        if param.grad is None:  # another hook has taken it
            return
        if is_capturing():
            raise RuntimeError(
                "gradient_release=True steps parameters during the backward pass, which cannot be captured in a CUDA "
                "graph; build the optimizer without it"
            )
        with self._lock:
            self._check_once()
            running = self._running
            if id(param) in running.versions:
                raise RuntimeError(self._second_gradient(param))
            if id(param) in self._averaged_later:
                running.versions[id(param)] = None
                return
            running.versions[id(param)] = _version(param.grad)
            key = bucket_key(param)
            self._step_waiting(key, running.waiting[key].add(param))

    def _check_once(self) -> None:
        if not self._checked:
            self._optimizer.run_first_gradient_checks()
            self._checked = True

    def average_later(self, params: Collection[Tensor]) -> None:
        """Do not step `params` when their gradients are final, but when `take_means` hands over the means."""
        self._averaged_later |= set(map(id, params))

    def take_means(self, params: Sequence[Tensor], means: Sequence[Tensor]) -> list[bool]:
        """Step those of `params` that this optimizer has with `means`, their gradients averaged over ranks.

        Returns:
            For each parameter, whether it was stepped, and its gradient freed.
        """
        with self._lock:
            to_step = self._averaged_later & (self._running.versions.keys() - self._running.stepped)
            mine = [id(param) in to_step for param in params]
            bucket = self._running.waiting["means"]  # all that is there is stepped, since DDP keeps it in any case
            for param, mean, is_mine in zip(params, means, mine, strict=True):
                if is_mine:
                    param.grad = mean
                    self._running.versions[id(param)] = _version(mean)
                    bucket.add(param)
            self._step_waiting("means", len(bucket.params) - 1)
        return mine

    # At the end of a step.

    def end_step(self) -> Tensor | None:
        """Step the parameters that have a gradient and were not stepped during the backward pass, and end the step.

        Returns:
            The norm of all gradients before clipping, FP32 scalar; None without `clip="delayed"`.

        Raises:
            RuntimeError: a stepped parameter was given another gradient, or settings were changed since.
        """
        with self._lock:
            self._step_rest()
            running = self._running
            if running.stepped and not self._ended_once:
                self._optimizer.run_first_step_checks()  # only now all gradients have been there
                self._ended_once = True
            norm = self.clipping.end_step() if self._optimizer.clip == "delayed" and running.stepped else None
            self._running = _RunningStep()
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
            self._step_rest()
            return self.clipping.norm()

    def forget_waiting(self) -> None:
        """Forget gradients that no step has taken yet; called by `zero_grad`."""
        with self._lock:
            for bucket in self._running.waiting.values():
                for param in bucket.take(len(bucket.params)):
                    self._running.versions.pop(id(param), None)
            self.watch_parameters()

    def resume(self, norm_before: float) -> None:
        """Start a step of which no parameter has been stepped yet, because states were loaded.

        Args:
            norm_before: the gradient norm of their last step, by which `clip="delayed"` clips the next one.
        """
        with self._lock:
            self._running = _RunningStep()
            self._ended_once = False
            self.clipping.resume(norm_before)
            self.watch_parameters()

    def has_stepped(self, param: Tensor) -> bool:
        """Return whether `param` has been stepped since the last `step()`."""
        return id(param) in self._running.stepped

    def check_between_steps(self, call: str) -> None:
        """Raise RuntimeError if parameters have been stepped since the last `step()`.

        Args:
            call: what was asked for, for the message.
        """
        if self._running.stepped:
            raise RuntimeError(
                f"{call} between the backward pass and step(): gradient_release=True has stepped "
                f"{len(self._running.stepped)} of {sum(1 for _ in self._params())} parameters, and not the others. "
                "Do it after step()"
            )

    # The steps.

    def _params(self) -> Any:
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _step_rest(self) -> None:
        """Step all parameters that have a gradient and have not been stepped."""
        self._check_once()
        running = self._running
        waiting = {id(param) for bucket in running.waiting.values() for param in bucket.params}
        for param in self._params():
            if param.grad is None or id(param) in waiting:
                continue
            if id(param) not in running.stepped:
                running.waiting[bucket_key(param)].add(param)
            elif id(param) in self._averaged_later:
                param.grad = None  # DDP's view of its bucket
            else:
                raise RuntimeError(self._second_gradient(param))
        for key, bucket in running.waiting.items():
            self._step_waiting(key, len(bucket.params))
        if running.settings is not None and running.settings != self._settings():
            raise RuntimeError(
                "the learning rate or another setting of a param group was changed between the backward pass and "
                "step(), but gradient_release=True has stepped parameters with the former ones; change settings before "
                "the backward pass"
            )

    def _step_waiting(self, key: Any, count: int) -> None:
        """Step the `count` oldest parameters that wait under `key`, unless somebody has set their gradients to None."""
        if count < 1:
            return
        waiting = self._running.waiting[key]
        bucket = [param for param in waiting.params[:count] if param.grad is not None]
        for param in bucket:
            version = self._running.versions.get(id(param))
            if version is not None and version != _version(param.grad):
                raise RuntimeError(
                    f"the gradient of {self._name(param)} was written to after autograd had computed it, as with "
                    "torch.nn.utils.clip_grad_norm_ or GradScaler.unscale_, but gradient_release=True has stepped "
                    f"other parameters without that. To clip, {ALTERNATIVES}; to change gradients one by one, use "
                    "param.register_hook"
                )
        if bucket:
            self._step(key, bucket)
        waiting.take(count)

    @without_grad
    def _step(self, key: Any, bucket: Sequence[Tensor]) -> None:
        """Step the parameters of `bucket`, and free their gradients."""
        optimizer, running = self._optimizer, self._running
        if running.settings is None:
            optimizer.check_gradient_release()
            running.settings = self._settings()
        slot = key, running.buckets[key]  # its plan fits if the backward pass has the order of the last one
        with interrupts.deferred():  # what was stepped is noted before a signal can raise
            self._plans[slot] = optimizer.step_part(bucket, self._plans.get(slot))
            running.buckets[key] += 1
            running.stepped.update(map(id, bucket))

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

    def _name(self, param: Tensor) -> str:
        for number, group in enumerate(self._optimizer.param_groups):
            for position, each in enumerate(group["params"]):
                if each is param:
                    names = group.get("param_names")
                    return names[position] if names else f"param_groups[{number}]['params'][{position}]"
        return f"a parameter of shape {tuple(param.shape)}"

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


class _RunningStep:
    """The step that has begun since the last one ended.

    Attributes:
        versions: identity of each parameter whose gradient is final → the version of that gradient.
        waiting: parameters to be stepped, by `bucket_key`, or "means" for those that DDP has averaged.
        stepped: identities of the parameters that have been stepped.
        buckets: how many buckets have been stepped, by the same keys.
        settings: of the param groups when the first bucket was stepped.
    """

    def __init__(self) -> None:
        self.versions: dict[int, Any] = {}
        self.waiting: dict[Any, GradientBucket] = defaultdict(GradientBucket)
        self.stepped: set[int] = set()
        self.buckets: Counter[Any] = Counter()
        self.settings: list[dict[str, Any]] | None = None


def _version(grad: Tensor | None) -> Any:
    """The count of writes to a gradient; None if torch does not count them."""
    assert grad is not None
    try:
        return grad._version, local_shard(grad)._version
    except RuntimeError:  # made in inference mode
        return None
