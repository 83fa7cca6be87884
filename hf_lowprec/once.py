"""What is done once: messages per process, and properties per object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

_Value = TypeVar("_Value")
_said: set[object] = set()


def first_time(what: object) -> bool:
    """Return whether this is the first question about `what` in this process."""
    is_first = what not in _said
    _said.add(what)
    return is_first


class cached_property(functools.cached_property[_Value]):
    """Computed once per object; by several threads at the same time, if they ask together.

    Until Python 3.12, that of `functools` holds a lock that all objects of the class share. A process that is forked
    while another thread holds it waits forever.
    """

    def __init__(self, function: Callable[[Any], _Value]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
