"""Replaces a method of one instance or of a class, or a function of a module, by a wrapper around it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_WRAPPERS = "_hf_lowprec_wrappers"
"""The attribute of an instance that holds its `_Wrappers`, and of the methods of classes that call them."""


def wrap_method(owner: object, name: str, wrapper: Callable) -> None:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`; for a method, `args` begin with the instance.

    An instance is still freed with its last reference, since its wrapped method does not refer to it. It can be
    pickled if `wrapper` can.
    """
    if not isinstance(owner, type | ModuleType):
        _wrap_method_of_instance(owner, name, wrapper)
        return
    replaced = inspect.getattr_static(owner, name)
    kind = type(replaced) if isinstance(replaced, classmethod | staticmethod) else None
    original: Callable = replaced.__func__ if kind else getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, kind(call) if kind else call)


def is_wrapped(instance: object, name: str, wrapper: Callable) -> bool:
    """Return whether `wrap_method` was called with these arguments for an instance, or for what it is a copy of."""
    return any(wrapper in found for (_, method), found in vars(instance).get(_WRAPPERS, {}).items() if method == name)


def unwrap_method(instance: object, name: str, wrapper: Callable) -> None:
    """Undo `wrap_method` with these arguments, which were those of its last call for this method."""
    attributes = vars(instance)
    wrappers = _Wrappers(attributes.pop(_WRAPPERS))
    key = next(key for key, found in wrappers.items() if key[1] == name and wrapper in found)
    remaining = tuple(other for other in wrappers.pop(key) if other is not wrapper)
    first = remaining[0] if remaining else None
    if len(remaining) == 1 and isinstance(first, functools.partial) and first.func is _call_attribute:
        attributes[name] = first.args[0]
    elif remaining:
        wrappers[key] = remaining
    if wrappers:
        attributes[_WRAPPERS] = wrappers


@contextlib.contextmanager
def temporarily_wrapped(owner: object, name: str, wrapper: Callable) -> Iterator[None]:
    """Replace `owner.name` inside, as `wrap_method` does."""
    changed = (name,) if isinstance(owner, type | ModuleType) else (name, _WRAPPERS)
    before = {attribute: vars(owner)[attribute] for attribute in changed if attribute in vars(owner)}
    wrap_method(owner, name, wrapper)
    try:
        yield
    finally:
        for attribute in changed:
            if attribute in before:
                setattr(owner, attribute, before[attribute])
            elif attribute in vars(owner):
                delattr(owner, attribute)


class _Wrappers(dict[tuple[type, str], tuple[Callable, ...]]):
    """The wrappers of the methods of an instance, by the class that has the method and its name, innermost first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (dict(self),)


def _unpickled(wrappers: dict[tuple[type, str], tuple[Callable, ...]]) -> _Wrappers:
    for cls, name in wrappers:
        _call_wrappers(cls, name)
    return _Wrappers(wrappers)


def _wrap_method_of_instance(instance: object, name: str, wrapper: Callable) -> None:
    attributes = vars(instance)
    cls = next(cls for cls in type(instance).__mro__ if name in vars(cls))
    _call_wrappers(cls, name)
    wrappers = attributes.get(_WRAPPERS, _Wrappers())
    of_method = wrappers.get((cls, name), ())
    if name in attributes:  # it hides the method of the class
        of_method = (functools.partial(_call_attribute, attributes.pop(name)),)
    attributes[_WRAPPERS] = _Wrappers({**wrappers, (cls, name): (*of_method, wrapper)})


def _call_attribute(attribute: Callable, original: Callable, instance: object, *args: Any, **kwargs: Any) -> Any:
    return attribute(*args, **kwargs)


def _call_wrappers(cls: type, name: str) -> None:
    """Let a method of a class call the wrappers that its instance has for it. Calling it again has no effect."""
    original = getattr(cls, name)
    if hasattr(original, _WRAPPERS):
        return

    @functools.wraps(original)
    def call(instance: object, *args: Any, **kwargs: Any) -> Any:
        method = original
        for wrapper in vars(instance).get(_WRAPPERS, {}).get((cls, name), ()):
            method = functools.partial(wrapper, method)
        return method(instance, *args, **kwargs)

    setattr(call, _WRAPPERS, True)
    setattr(cls, name, call)
