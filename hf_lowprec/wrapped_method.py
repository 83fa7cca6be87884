"""Replaces a method of one instance or of a class, or a function of a module, with a wrapper around it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any

_WRAPPERS = "_hf_lowprec_wrappers"
"""The attribute of an instance that holds its `_Wrappers`."""


def wrap_method(owner: object, name: str, wrapper: Callable, cls: type | None = None) -> None:
    """Replace `owner.name` with `wrapper(original, *args, **kwargs)`; for a method, `args` begin with the instance.

    An instance is still freed with its last reference, since its wrapped method does not refer to it. Copies of it have
    the wrapper too, and call it with themselves. It can be pickled if `wrapper` can. If `name` is a property, its
    getter is wrapped. `cls` names a base class whose method is wrapped, which overrides reach through `super()`.
    """
    if not isinstance(owner, type | ModuleType):
        _wrap_method_of_instance(owner, name, wrapper, cls)
        return
    replaced = inspect.getattr_static(owner, name)
    kind = type(replaced) if isinstance(replaced, classmethod | staticmethod) else None
    original: Callable = replaced.__func__ if kind else getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, kind(call) if kind else call)


def wrap_once(instance: object, name: str, wrapper: Callable) -> bool:
    """Call `wrap_method`, unless it was called with these arguments for the instance or for the one it is a copy of.

    Returns:
        Whether the wrapper is new.
    """
    is_new = _key(instance, name, wrapper) is None
    if is_new:
        wrap_method(instance, name, wrapper)
    return is_new


def unwrap_method(instance: object, name: str, wrapper: Callable) -> None:
    """Undo `wrap_method` with these arguments, if it was called, and was the last call for this method."""
    key = _key(instance, name, wrapper)
    if key is None:
        return
    attributes = vars(instance)
    wrappers = _Wrappers(attributes.pop(_WRAPPERS))
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


def _key(instance: object, name: str, wrapper: Callable) -> tuple[type, str] | None:
    """Return the key under which the `_Wrappers` of an instance have a wrapper of this method; None if they do not."""
    wrappers: _Wrappers = vars(instance).get(_WRAPPERS, _Wrappers())
    return next((key for key, found in wrappers.items() if key[1] == name and wrapper in found), None)


class _CallingWrappers(functools.partial):
    """The `__wrapped__` of a class's method that calls the wrappers of its instance. It calls them as well.

    torch.fx and `inspect` follow it to the original method. Accelerate looks for the bound method that it has wrapped
    in autocast, and makes what it finds the `forward`: this object, not the method without wrappers.
    """

    __wrapped__: Callable

    def __eq__(self, other: object) -> bool:
        return getattr(other, "__func__", None) is self.func

    __hash__ = functools.partial.__hash__


class _Wrappers(dict[tuple[type, str], tuple[Callable, ...]]):
    """The wrappers of the methods of an instance, by the class that has the method and its name, innermost first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (dict(self),)


def _unpickled(wrappers: dict[tuple[type, str], tuple[Callable, ...]]) -> _Wrappers:
    for cls, name in wrappers:
        _call_wrappers(cls, name)
    return _Wrappers(wrappers)


def _wrap_method_of_instance(instance: object, name: str, wrapper: Callable, cls: type | None) -> None:
    attributes = vars(instance)
    cls = cls or next(base for base in type(instance).__mro__ if name in vars(base))
    original = _call_wrappers(cls, name)

    def is_own(value: Any) -> bool:
        is_bound = isinstance(value, MethodType) and value.__self__ is instance
        return is_bound and _original(value.__func__) is original

    if is_own(attributes.get(name)):
        del attributes[name]  # which would make copies of the instance call this one
    # Accelerate's hooks replace `forward`, call the method that they have kept, and put it back when they are removed.
    kept = [attribute for attribute, value in attributes.items() if is_own(value)]
    is_hidden = name in attributes and not (kept and is_own(inspect.unwrap(attributes[name], stop=is_own)))
    attributes |= {attribute: MethodType(vars(cls)[name], instance) for attribute in kept}
    wrappers = attributes.get(_WRAPPERS, _Wrappers())
    of_method = wrappers.get((cls, name), ())
    if is_hidden:
        of_method = (functools.partial(_call_attribute, attributes.pop(name)),)
    attributes[_WRAPPERS] = _Wrappers({**wrappers, (cls, name): (*of_method, wrapper)})


def _call_attribute(attribute: Callable, original: Callable, instance: object, *args: Any, **kwargs: Any) -> Any:
    return attribute(*args, **kwargs)


def _original(method: Any) -> Any:
    """Return the method that `method` calls the wrappers of, or `method` itself if it calls none."""
    calling = method if isinstance(method, _CallingWrappers) else getattr(method, "__wrapped__", None)
    return calling.__wrapped__ if isinstance(calling, _CallingWrappers) else method


def _call_wrappers(cls: type, name: str) -> Callable:
    """Let a method of a class call the wrappers that its instance has for it. Calling it again has no effect.

    Returns:
        The method, or the getter of the property, as it was before the first call.
    """
    replaced = getattr(cls, name)
    original: Any = replaced.fget if isinstance(replaced, property) else replaced
    if _original(original) is not original:
        return _original(original)

    @functools.wraps(original)
    def call(instance: object, *args: Any, **kwargs: Any) -> Any:
        method = original
        for wrapper in vars(instance).get(_WRAPPERS, {}).get((cls, name), ()):
            method = functools.partial(wrapper, method)
        return method(instance, *args, **kwargs)

    call.__wrapped__ = functools.update_wrapper(_CallingWrappers(call), original)
    setattr(cls, name, replaced.getter(call) if isinstance(replaced, property) else call)
    return original
