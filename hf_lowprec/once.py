"""Things that are done once: messages per process, and properties per object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_said: set[object] = set()


def first_time(what: object) -> bool:
    """Return whether this is the first call with `what` in this process."""
    is_first = what not in _said
    _said.add(what)
    return is_first


class cached_property(functools.cached_property[_Value]):
    """A property that is computed once per object, or by several threads at the same time.

    Until Python 3.12, the property of `functools` holds a lock that all objects of the class share. A process that is
    forked while another thread holds it waits forever.
    """

    def __init__(self, function: Callable[[Any], _Value]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
