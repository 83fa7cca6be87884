"""Holds an optimizer's gradients before its step: in `param.grad`, or in a collector that takes them in backward.

A hook on each parameter runs when its gradient is final: after autograd has added up all its uses, and after the
reduce-scatter of FSDP2, which calls the same hooks. Parameters are collected in a bucket. A full bucket is taken: its
parameters are stepped (`release.py`), or their gradients are moved to the host (`offload.py`). `step()` takes the rest.

The newest gradient waits, so that other code's hooks on its parameter run first. Code that writes to the gradients
before `step()`, as `torch.nn.utils.clip_grad_norm_` does, finds the waiting gradient, and the write is noticed.

DDP runs these hooks before it averages, so its communication hook hands over the means instead: see `take_means` and
`integrations/collect_after_reduction.py`.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_lowprec.optim.gradients.buckets import GradientBucket, bucket_key
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.private_torch_apis import never_compiled
from hf_lowprec.optim.sharding import place_gradients
from hf_lowprec.optim.step.clipping import write_counts
from hf_lowprec.optim.validation import check_not_capturing

_collectors: Any = WeakIdKeyDictionary()
"""Parameter → a weak reference to the `GradientCollector` that has a hook on it."""


class Gradients:
    """The gradients of an optimizer's parameters, which stay in `param.grad` until `step()`.

    Attributes:
        gradient_of: returns the gradient of a parameter in the coming step, or None. It is written in C, because a step
            calls it for every parameter.
        stepped_in_parts: whether parameters are stepped before `step()` is called, which ends the step.

    Args:
        optimizer: a `LowPrecisionOptimizer`. It is referenced weakly.
    """

    gradient_of: Callable[[Tensor], Any] = operator.attrgetter("grad")
    stepped_in_parts: bool = False

    def __init__(self, optimizer: Any) -> None:
        self._reference = weakref.ref(optimizer)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "the optimizer owns this object"
        return optimizer

    def params(self) -> list[Tensor]:
        """Return all parameters of the optimizer."""
        return params_of(self._optimizer)

    def gather(self) -> None:
        """Move all gradients to where the step, or their norm, expects them."""
        place_gradients(self.params())

    def end_step(self) -> None:
        """End the step: step the remaining parameters, and forget gradients that are not in `param.grad`."""

    def zero(self, set_to_none: bool) -> None:
        """Forget the gradients that are not in `param.grad`, or zero them; `zero_grad` has handled all others.

        Args:
            set_to_none: the argument of `zero_grad`.
        """

    def watch_parameters(self) -> None:
        """Take the gradients of new parameters too.

        Called wherever parameters may have been added, unfrozen or replaced, as FSDP2 replaces them.
        """

    def states_were_loaded(self) -> None:
        """Forget that parameters have been stepped since the last `step()`: their states were replaced."""

    def stop(self) -> None:
        """Stop taking gradients."""

    def check_between_steps(self, call: str) -> None:
        """Raise RuntimeError if only some parameters have been stepped since the last `step()`.

        Args:
            call: what was called, for the message.
        """

    def check_take_over(self) -> None:
        """Raise RuntimeError if stopping now would lose gradients."""

    def check_no_other_takes_them(self) -> None:
        """Raise RuntimeError if another existing optimizer takes gradients of this one's parameters."""
        if any(collector not in (None, self) for collector in map(_collector_on, self.params())):
            raise RuntimeError(
                "another optimizer, built with gradient_release=True or offload_gradients=True, takes the gradients of "
                "these parameters during the backward pass; call its zero_grad(), step() and stop_gradient_release(), "
                "or delete it"
            )


class GradientCollector(Gradients, ABC):
    """Takes the gradients of an optimizer's parameters as soon as they are final. Its hooks end with the optimizer.

    Attributes:
        argument: the optimizer's argument that turns it on, for messages.
        accumulates: whether a parameter may get several gradients before `step()`.
    """

    argument: ClassVar[str]
    accumulates: ClassVar[bool]
    first_gradient_checks: ClassVar[list[Callable[[GradientCollector], None]]] = []
    """Checks that run before the first gradient is taken. The layers above, which know about ranks, add them here. They
    may raise: gradients must not be taken before they are averaged over ranks.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._hook = functools.partial(_run_hook, weakref.ref(self))
        self._handles: dict[Tensor, Any] = {}  # of the hooks, by parameter
        weakref.finalize(self, _remove_hooks, self._handles)
        self._lock = threading.RLock()  # autograd has a thread per device
        self._averaged_later: set[int] = set()  # identities of parameters, see `average_later`
        self._checked = False
        self.start()

    def start(self) -> None:
        """Give every parameter that requires a gradient a hook, and take parameters over from other optimizers.

        If a backward pass was interrupted, its step is over: parameters that it has stepped stay stepped.
        """
        self._is_started = True
        self._taken_over: set[int] = set()  # identities of the parameters that a newer optimizer has
        self.begin_anew()

    def stop(self) -> None:
        """Remove the hooks until `start` is called. `step()` then finds all gradients."""
        self._is_started = False
        _remove_hooks(self._handles)

    def watch_parameters(self) -> None:
        watched = {param for param in self.params() if param.requires_grad and id(param) not in self._taken_over}
        if watched == self._handles.keys() or not self._is_started:
            return
        new = watched - self._handles.keys()
        for other in set(filter(None, map(_collector_on, new))):  # of an earlier optimizer of the same model
            other.check_take_over()
        for param in self._handles.keys() - watched:
            self._handles.pop(param).remove()
        for param in new:
            if earlier := _collector_on(param):
                earlier._handles.pop(param).remove()
                earlier._taken_over.add(id(param))
            self._handles[param] = param.register_post_accumulate_grad_hook(self._hook)
            _collectors[param] = weakref.ref(self)
        self._checked = False

    def _begin_step(self) -> None:
        """Begin a step, before any gradient is taken."""
        self._versions: dict[Tensor, Any] = {}  # of the gradients that are final, by parameter
        self._waiting: dict[Any, GradientBucket] = defaultdict(GradientBucket)  # "means" are those averaged by DDP
        self._taken: set[Tensor] = set()  # parameters whose gradients have been taken
        self._sentinel: Tensor | None = None  # its gradient stays until `step()`, so that foreign writes are noticed

    def begin_anew(self) -> None:
        """Begin a step, even if an earlier one has not ended."""
        with self._lock:
            self._begin_step()
            self.watch_parameters()

    def gradient_is_final(self, param: Tensor) -> None:
        """Put the gradient of `param` into its bucket, and take the bucket if it is full; called by its hook.

        Raises:
            RuntimeError: it is a second gradient and gradients are not accumulated, or a CUDA graph is being captured.
        """
        if param.grad is None:  # another hook has taken it
            return
        check_not_capturing()
        with self._lock:
            self._check_once()
            self._before_final(param)
            if param.grad is None:  # it had waited since an interrupted pass
                return
            if id(param) in self._averaged_later:
                self._versions[param] = None
            else:
                self._enqueue(param)

    @abstractmethod
    def _before_final(self, param: Tensor) -> None:
        """Handle a gradient that autograd has computed for `param`. Raises RuntimeError if it cannot be taken."""

    def _enqueue(self, param: Tensor, key: Any = None) -> None:
        """Let the final gradient of `param` wait in its bucket, or in `key`; if full, take all but the newest."""
        key = key or bucket_key(param)
        self._versions[param] = gradient_version(param.grad)
        self._take_waiting(key, self._waiting[key].add(param))

    def _check_once(self) -> None:
        if not self._checked:
            for check in self.first_gradient_checks:
                check(self)
            self._checked = True

    def average_later(self, params: Collection[Tensor]) -> None:
        """Take the gradients of `params` when `take_means` hands over their means, not when they are final."""
        self._averaged_later |= set(map(id, params))

    def take_means(self, params: Sequence[Tensor], means: Sequence[Tensor]) -> list[bool]:
        """Take `means`, the gradients of `params` averaged over ranks, for the parameters of this optimizer.

        Returns:
            For each parameter, whether its gradient was taken and freed.
        """
        with self._lock:
            done = set() if self.accumulates else self._taken
            final = self._versions.keys() - done
            mine = [id(param) in self._averaged_later and param in final for param in params]
            for param, mean, is_mine in zip(params, means, mine, strict=True):
                if is_mine:
                    param.grad = mean
                    self._enqueue(param, "means")
            newest = 0 if self.accumulates else 1
            self._take_waiting("means", len(self._waiting["means"].params) - newest)  # DDP keeps them in any case
        return mine

    def has_taken(self, param: Tensor) -> bool:
        """Return whether a gradient of `param` has been taken since the last `step()`."""
        return param in self._taken

    def _take_rest(self) -> None:
        """Take all gradients that have not been taken."""
        self._check_once()
        waiting = {param for bucket in self._waiting.values() for param in bucket.params}
        for param in self.params():
            if param.grad is None or param in waiting or param is self._sentinel:
                continue
            if param not in self._taken:
                self._waiting[bucket_key(param)].add(param)
            elif id(param) in self._averaged_later:
                param.grad = None  # DDP's view of its bucket
            else:
                raise RuntimeError(self._second_gradient(param))
        self._take_all_waiting()

    def _take_all_waiting(self) -> None:
        for key, bucket in self._waiting.items():
            self._take_waiting(key, len(bucket.params))

    def _take_waiting(self, key: Any, count: int) -> None:
        """Take the `count` oldest that wait under `key`, unless their gradients were set to None."""
        if count < 1:
            return
        bucket = self._waiting[key]
        if params := [param for param in bucket.params[:count] if param.grad is not None]:
            self._take(key, params)
        bucket.take(count)

    @abstractmethod
    def _take(self, key: Any, params: Sequence[Tensor]) -> None:
        """Take the gradients of `params`, which waited under `key`: free them, and add the parameters to `_taken`."""

    @abstractmethod
    def _second_gradient(self, param: Tensor) -> str:
        """Return the error message for a gradient of `param` that comes after one was taken and cannot be added."""

    _without_that: ClassVar[str]
    """The end of the error message about a waiting gradient that was written to: what happened before, how to clip."""

    def _check_version(self, param: Tensor) -> None:
        """Raise RuntimeError if the gradient of `param` was written to since autograd computed it."""
        version = self._versions.get(param)
        if version is not None and version != gradient_version(param.grad):
            raise RuntimeError(
                f"the gradient of {self._name(param)} was written to after autograd had computed it, as with "
                f"torch.nn.utils.clip_grad_norm_ or GradScaler.unscale_, but {self.argument} has {self._without_that}; "
                "to change gradients one by one, use param.register_hook"
            )

    def _name(self, param: Tensor) -> str:
        for number, group in enumerate(self._optimizer.param_groups):
            for position, candidate in enumerate(group["params"]):
                if candidate is param:
                    names = group.get("param_names")
                    return names[position] if names else f"param_groups[{number}]['params'][{position}]"
        return f"a parameter of shape {tuple(param.shape)}"


def collector_of(optimizer: Any) -> GradientCollector | None:
    """Return what takes gradients of `optimizer`, of any library, in the backward pass; None if nothing does."""
    gradients = getattr(optimizer, "gradients", None)
    return gradients if isinstance(gradients, GradientCollector) else None


def _collector_on(param: Tensor) -> GradientCollector | None:
    """Return what takes the gradients of `param`; None if nothing does."""
    collector: GradientCollector | None = _collectors.get(param, lambda: None)()
    return collector if collector is not None and param in collector._handles else None


@never_compiled
def _run_hook(reference: weakref.ref[GradientCollector], param: Tensor) -> None:
    if (collector := reference()) is not None:
        collector.gradient_is_final(param)


def _remove_hooks(handles: dict[Tensor, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def gradient_version(grad: Tensor | None) -> Any:
    """Return the identity of a gradient, and the count of writes to it; None if there is none."""
    return None if grad is None else (id(grad), write_counts([grad]))
