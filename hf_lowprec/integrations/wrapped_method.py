"""Wraps a method of one instance so that the wrapper pickles along with the instance."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any


def wrap_method(instance: object, name: str, wrapper: Callable) -> None:
    """Replace the method `name` of this one instance by `wrapper(original, *args, **kwargs)`."""
    setattr(instance, name, WrappedMethod(instance, name, wrapper))


@contextlib.contextmanager
def temporarily_wrapped(instance: object, name: str, wrapper: Callable) -> Iterator[None]:
    """Replace the method `name` of this one instance inside, as `wrap_method` does."""
    wrapped_before = vars(instance).get(name)
    wrap_method(instance, name, wrapper)
    try:
        yield
    finally:
        if wrapped_before is None:
            vars(instance).pop(name, None)
        else:
            setattr(instance, name, wrapped_before)


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
