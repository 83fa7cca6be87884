"""Messages that are given once per process."""

from __future__ import annotations

_said: set[object] = set()


def first_time(what: object) -> bool:
    """Return whether this is the first question about `what` in this process."""
    is_first = what not in _said
    _said.add(what)
    return is_first
