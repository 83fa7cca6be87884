"""Hooks that run when the gradient of a parameter is final: after autograd has added up all its uses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_lowprec.optim.private_torch_apis import never_compiled

_owners: Any = WeakIdKeyDictionary()
"""Parameter → a weak reference to the `GradientHooks` that it has a hook of."""


class GradientHooks:
    """The hooks on the parameters of one optimizer. They are removed when this object is deleted.

    Args:
        gradient_is_final: a method that is called with each parameter. Its object is referenced weakly, so that
            parameters do not keep an optimizer alive.
        check_take_over: a method of the same object that is called before another one takes parameters over. It may
            raise.
    """

    def __init__(self, gradient_is_final: Callable[[Tensor], None], check_take_over: Callable[[], None]) -> None:
        self._check_take_over = weakref.WeakMethod(check_take_over)
        self._hook = functools.partial(_run_hook, weakref.WeakMethod(gradient_is_final))
        self._hooks: dict[int, tuple[Tensor, Any]] = {}
        self._taken_over: set[int] = set()
        self._started = True
        weakref.finalize(self, _remove_all, self._hooks)

    def start(self) -> None:
        """Let `watch` take parameters over from other optimizers, and begin again after `stop`."""
        self._started = True
        self._taken_over.clear()

    def stop(self) -> None:
        """Remove the hooks until `start` is called."""
        self._started = False
        _remove_all(self._hooks)

    def watch(self, params: Iterable[Tensor]) -> bool:
        """Give all `params` that require a gradient a hook, and remove the hooks of all others.

        Parameters that an optimizer built later has taken over are left to that one.

        Returns:
            Whether hooks were added or removed.
        """
        watched = {id(param): param for param in params if param.requires_grad and id(param) not in self._taken_over}
        if watched.keys() == self._hooks.keys() or not self._started:
            return False
        new = [watched[number] for number in watched.keys() - self._hooks.keys()]
        for earlier in set(filter(None, map(owner_of, new))):  # optimizers of the same model
            if (check := earlier._check_take_over()) is not None:
                check()
        for number in self._hooks.keys() - watched.keys():
            self._hooks.pop(number)[1].remove()
        for param in new:
            owner = owner_of(param)
            if owner is not None:
                owner._hooks.pop(id(param))[1].remove()
                owner._taken_over.add(id(param))
            self._hooks[id(param)] = param, param.register_post_accumulate_grad_hook(self._hook)
            _owners[param] = weakref.ref(self)
        return True


def owner_of(param: Tensor) -> GradientHooks | None:
    """The hooks of the optimizer that takes the gradients of `param`, if one does."""
    owner: GradientHooks | None = _owners.get(param, lambda: None)()
    return owner if owner is not None and id(param) in owner._hooks else None


@never_compiled
def _run_hook(gradient_is_final: Callable[[], Callable[[Tensor], None] | None], param: Tensor) -> None:
    if (living := gradient_is_final()) is not None:
        living(param)


def _remove_all(hooks: dict[int, tuple[Tensor, Any]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
    hooks.clear()
