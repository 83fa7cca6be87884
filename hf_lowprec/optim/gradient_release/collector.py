"""Collects gradients as soon as they are final, bucket by bucket, so that they can be freed during the backward pass.

A hook on each parameter runs when its gradient is final: after autograd has added up all its uses, and after the
reduce-scatter of FSDP2, which calls the same hooks. Parameters are collected in a bucket. A full bucket is taken: its
parameters are stepped (`release.py`), or their gradients are moved to the host (`offload/gradients.py`). `step()` takes
the rest.

One gradient always waits for `step()`, so that code which writes to the gradients in between, as
`torch.nn.utils.clip_grad_norm_` does, finds one, and the write is noticed. It is the newest one. If
gradients are accumulated, it is that of the smallest parameter, and the others are taken at the end of every backward
pass, so that none of them is added to a later one on the device.

DDP runs these hooks before it averages, so its communication hook hands over the means instead: see `take_means` and
`integrations/collect_after_reduction.py`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.gradient_release.buckets import GradientBucket, bucket_key
from hf_lowprec.optim.gradient_release.hooks import GradientHooks, owner_of
from hf_lowprec.optim.private_torch_apis import at_end_of_backward_pass, backward_pass
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.validation import check_not_capturing


class CollectingOptimizer(Protocol):
    """The interface of a `LowPrecisionOptimizer` that its `GradientCollector` uses."""

    param_groups: list[ParamGroup]


class GradientCollector(ABC):
    """Takes the gradients of an optimizer's parameters as soon as they are final.

    Attributes:
        argument: the optimizer's argument that asks for it, for messages.
        accumulates: whether a parameter may get several gradients before `step()`.

    Args:
        optimizer: the optimizer. It is referenced weakly; when it is deleted, the hooks are removed.
    """

    argument: ClassVar[str]
    accumulates: ClassVar[bool]
    first_gradient_checks: ClassVar[list[Callable[[GradientCollector], None]]] = []
    """Called before the first gradient is taken. The layers above, which know about ranks, add them here. They may
    raise: gradients must not be taken before they are averaged over ranks.
    """

    def __init__(self, optimizer: CollectingOptimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self._averaged_later: set[int] = set()  # identities of parameters, see `average_later`
        self._checked = False
        self._hooks = GradientHooks(self.gradient_is_final, self.check_take_over)
        self._lock = threading.RLock()  # autograd has a thread per device
        self._begin_step()
        self.start()

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "the optimizer owns this object"
        return optimizer

    def start(self) -> None:
        """Give every parameter that requires a gradient a hook. Takes parameters over from other optimizers.

        If a backward pass was interrupted, its step is over: what it has taken stays as it is.
        """
        self._hooks.start()
        self._begin_step()
        self.watch_parameters()

    def check_take_over(self) -> None:  # noqa: B027
        """Raise RuntimeError if this holds gradients that would be lost if it stopped now."""

    def stop(self) -> None:
        """Remove the hooks until `start` is called. `step()` then finds all gradients."""
        self._hooks.stop()

    def watch_parameters(self) -> None:
        """Give new parameters a hook, and remove the hooks of those that are gone.

        Called wherever parameters may have been added, unfrozen or replaced, as FSDP2 replaces them.
        """
        if self._hooks.watch(self.params()):
            self._checked = False

    def gradient_is_final(self, param: Tensor) -> None:
        """Put the gradient of `param` into its bucket, and take the bucket if it is full; called by its hook.

        Raises:
            RuntimeError: it is a second gradient and they are not accumulated, or a CUDA graph is captured.
        """
        if param.grad is None:  # another hook has taken it
            return
        check_not_capturing()
        with self._lock:
            self._check_once()
            running = self._running
            if id(param) in running.versions and not self.accumulates:
                raise RuntimeError(self._second_gradient(param))
            if self.accumulates:
                self._begin_pass(param)
                if param.grad is None:  # it waited since a pass that was interrupted
                    return
            if id(param) in self._averaged_later:
                running.versions[id(param)] = None
                return
            running.versions[id(param)] = gradient_version(param.grad)
            for final in self._ready_to_take(param):
                key = bucket_key(final)
                self._take_waiting(key, running.waiting[key].add(final))
            if self.accumulates and running.current_pass is None:  # no backward pass will end
                self._take_all_waiting()

    def _check_once(self) -> None:
        if not self._checked:
            for check in self.first_gradient_checks:
                check(self)
            self._checked = True

    def average_later(self, params: Collection[Tensor]) -> None:
        """Do not take the gradients of `params` when they are final, but when `take_means` hands over the means."""
        self._averaged_later |= set(map(id, params))

    def take_means(self, params: Sequence[Tensor], means: Sequence[Tensor]) -> list[bool]:
        """Take `means`, gradients averaged over ranks, of those of `params` that this optimizer has.

        Returns:
            For each parameter, whether its gradient was taken, and freed.
        """
        with self._lock:
            to_take = self._averaged_later & self._running.versions.keys()
            if not self.accumulates:
                to_take -= self._running.taken
            mine = [id(param) in to_take for param in params]
            bucket = self._running.waiting["means"]  # all that is there is taken, since DDP keeps it in any case
            for param, mean, is_mine in zip(params, means, mine, strict=True):
                if is_mine:
                    param.grad = mean
                    self._running.versions[id(param)] = gradient_version(mean)
                    for final in self._ready_to_take(param):
                        bucket.add(final)
            self._take_waiting("means", len(bucket.params) - (0 if self.accumulates else 1))
        return mine

    # The gradient that waits, if gradients are accumulated.

    def _ready_to_take(self, param: Tensor) -> list[Tensor]:
        """The parameters whose gradients may be taken now that the one of `param` is final: all but the one kept."""
        running = self._running
        former = running.kept
        smallest = former is None or (param.numel() <= former.numel() and not running.kept_is_fixed)
        if not self.accumulates or (param is not former and not (smallest and param.numel())):
            return [param]
        running.kept = param
        grad = param.grad
        if grad is not None and local_shard(grad)._is_view():  # of a bucket, which others write to, and which is large
            param.grad = grad.clone()
        running.versions[id(param)] = gradient_version(param.grad)
        return [] if former is None or former is param else [former]

    def _begin_pass(self, is_final: Tensor) -> None:
        """Note that a backward pass has begun, if it has; at its end, take what waits.

        Args:
            is_final: the parameter whose gradient is final now.
        """
        running = self._running
        if running.current_pass == (current := backward_pass()):
            return
        running.current_pass = current
        running.kept_is_fixed = running.kept is not None
        self.check_kept(is_final)
        self._take_all_waiting()  # of a pass that was interrupted
        taken = running.taken - self._averaged_later
        for param in self.params() if taken else ():
            if param.grad is not None and id(param) in taken and param is not is_final:
                raise RuntimeError(self._second_gradient(param))
        if current is not None:
            at_end_of_backward_pass(functools.partial(_end_pass, weakref.ref(self), running))

    def _take_all_waiting(self) -> None:
        for key, bucket in self._running.waiting.items():
            self._take_waiting(key, len(bucket.params))

    def check_kept(self, is_final: Tensor | None = None) -> None:
        """Raise RuntimeError if the gradient that waits was written to, or set to None, since autograd computed it.

        Args:
            is_final: the parameter to whose gradient autograd has just added.
        """
        kept = self._running.kept
        if kept is None or kept is is_final:
            return
        if kept.grad is None:
            raise RuntimeError(
                f"the gradient of {self._name(kept)} was set to None, as by model.zero_grad(), but {self.argument} "
                "has taken other gradients before; to forget gradients, call optimizer.zero_grad()"
            )
        self._check_version(kept)

    def forget_waiting(self) -> None:
        """Forget gradients that have not been taken yet; called by `zero_grad`."""
        with self._lock:
            for bucket in self._running.waiting.values():
                for param in bucket.take(len(bucket.params)):
                    self._running.versions.pop(id(param), None)
            self.watch_parameters()

    def has_taken(self, param: Tensor) -> bool:
        """Return whether a gradient of `param` has been taken since the last `step()`."""
        return id(param) in self._running.taken

    def params(self) -> Any:
        """All parameters of the optimizer."""
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _begin_step(self) -> None:
        """Begin a step of which nothing has been taken yet."""
        self._running = _RunningStep()

    def _take_rest(self) -> None:
        """Take all gradients that have not been taken."""
        self._check_once()
        running = self._running
        waiting = {id(param) for bucket in running.waiting.values() for param in bucket.params}
        for param in self.params():
            if param.grad is None or id(param) in waiting:
                continue
            if id(param) in running.taken and id(param) in self._averaged_later:
                param.grad = None  # DDP's view of its bucket
            elif id(param) in running.taken:
                raise RuntimeError(self._second_gradient(param))
            elif param is not running.kept:
                running.waiting[bucket_key(param)].add(param)
        self._take_all_waiting()

    def _take_waiting(self, key: Any, count: int) -> None:
        """Take the `count` oldest that wait under `key`, unless somebody has set their gradients to None."""
        if count < 1:
            return
        waiting = self._running.waiting[key]
        bucket = [param for param in waiting.params[:count] if param.grad is not None]
        for param in bucket if not self.accumulates else ():  # else it is taken as others have left it
            self._check_version(param)
        if bucket:
            self._take(key, bucket)
        waiting.take(count)

    def _check_version(self, param: Tensor) -> None:
        version = self._running.versions.get(id(param))
        if version is not None and version != gradient_version(param.grad):
            raise RuntimeError(
                f"the gradient of {self._name(param)} was written to after autograd had computed it, as with "
                f"torch.nn.utils.clip_grad_norm_ or GradScaler.unscale_, but {self.argument} has {self._without_that}; "
                "to change gradients one by one, use param.register_hook"
            )

    _without_that: ClassVar[str]
    """What has happened to other gradients without such a write, and how to clip."""

    @abstractmethod
    def _take(self, key: Any, bucket: Sequence[Tensor]) -> None:
        """Take the gradients of the parameters in `bucket`, which waited under `key`: free them, note `taken`."""

    @abstractmethod
    def _second_gradient(self, param: Tensor) -> str:
        """The message for a gradient of `param` that was found after one had been taken, and cannot be added to it."""

    def _name(self, param: Tensor) -> str:
        for number, group in enumerate(self._optimizer.param_groups):
            for position, each in enumerate(group["params"]):
                if each is param:
                    names = group.get("param_names")
                    return names[position] if names else f"param_groups[{number}]['params'][{position}]"
        return f"a parameter of shape {tuple(param.shape)}"


def collector_of(optimizer: Any) -> GradientCollector | None:
    """The gradient collector of an optimizer, which may be of another library; None if it has none."""
    collector = getattr(optimizer, "collector", None)
    return collector if isinstance(collector, GradientCollector) else None


def check_no_other_takes_gradients(optimizer: Any) -> None:
    """Raise RuntimeError if another optimizer, which still exists, takes gradients of this one's parameters."""
    own = None if optimizer.collector is None else optimizer.collector._hooks
    for group in optimizer.param_groups:
        for owner in map(owner_of, group["params"]):
            if owner is not None and owner is not own:
                raise RuntimeError(
                    "another optimizer, built with gradient_release=True or offload_gradients=True, takes the "
                    "gradients of these parameters during the backward pass; call its zero_grad(), step() and "
                    "stop_gradient_release(), or delete it"
                )


class _RunningStep:
    """The step that has begun since the last one ended.

    Attributes:
        versions: identity of each parameter whose gradient is final → the version of that gradient.
        waiting: parameters whose gradients wait, by `bucket_key`, or "means" for those that DDP has averaged.
        taken: identities of the parameters whose gradients have been taken.
        kept: if gradients are accumulated, the parameter whose gradient waits for `step()`.
        kept_is_fixed: whether no smaller one may take its place, because it has gradients of several passes.
        current_pass: identifies the last backward pass, if gradients are accumulated.
    """

    def __init__(self) -> None:
        self.versions: dict[int, Any] = {}
        self.waiting: dict[Any, GradientBucket] = defaultdict(GradientBucket)
        self.taken: set[int] = set()
        self.kept: Tensor | None = None
        self.kept_is_fixed = False
        self.current_pass: int | None = None


def _end_pass(reference: weakref.ref[GradientCollector], running: _RunningStep) -> None:
    """Take what waits at the end of a backward pass, unless its step is over."""
    collector = reference()
    if collector is not None and collector._running is running:
        with collector._lock:
            collector._take_all_waiting()


def gradient_version(grad: Tensor | None) -> Any:
    """A gradient and the count of writes to it; None if torch does not count them."""
    assert grad is not None
    try:
        return id(grad), grad._version, local_shard(grad)._version
    except RuntimeError:  # made in inference mode
        return None
