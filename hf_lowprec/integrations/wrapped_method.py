"""Replaces a method of one instance or of a class, or a function of a module, by a wrapper around it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any


def wrap_method(owner: object, name: str, wrapper: Callable) -> None:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`; for a class, `args` begin with the instance.

    What replaces the method of an instance pickles along with the instance, if `wrapper` does.
    """
    if not isinstance(owner, type | ModuleType):
        setattr(owner, name, WrappedMethod(owner, name, wrapper))
        return
    replaced = inspect.getattr_static(owner, name)
    kind = type(replaced) if isinstance(replaced, classmethod | staticmethod) else None
    original: Callable = replaced.__func__ if kind else replaced

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, kind(call) if kind else call)


@contextlib.contextmanager
def temporarily_wrapped(owner: object, name: str, wrapper: Callable) -> Iterator[None]:
    """Replace `owner.name` inside, as `wrap_method` does."""
    replaced = vars(owner).get(name)
    wrap_method(owner, name, wrapper)
    try:
        yield
    finally:
        if replaced is None:
            delattr(owner, name)
        else:
            setattr(owner, name, replaced)


class WrappedMethod:
    """A wrapped method of one instance.

    A closure would not pickle, and an `Accelerator` or a `Trainer` is pickled together with its attributes.
    """

    def __init__(self, instance: object, name: str, wrapper: Callable) -> None:
        wrapped_before = vars(instance).get(name)
        self.__setstate__((instance, name, wrapper, wrapped_before))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._original, *args, **kwargs)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._instance, self._name, self._wrapper, self._wrapped_before

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._instance, self._name, self._wrapper, self._wrapped_before = state
        # Not the bound method's own pickle, which would look the name up in the instance and find this object.
        method = MethodType(getattr(type(self._instance), self._name), self._instance)
        self._original: Callable = self._wrapped_before or method
        functools.update_wrapper(self, self._original, updated=())
