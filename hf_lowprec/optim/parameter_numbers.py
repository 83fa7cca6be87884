"""Numbers for the parameters of one-parameter optimizers, as those that step inside of backward.

A parameter's number selects its random bits (see `random_bits`). It is the parameter's position in the optimizer, which
would be 0 for all parameters that have an optimizer each: they would round alike, and their errors would add up instead
of averaging out. So such optimizers are numbered in the order of construction.

Optimizers of several parameters all start at 0, so that two runs in one process can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

_constructed: Counter[Hashable] = Counter()
"""One-parameter optimizers constructed since the last step of any optimizer, by kind."""


def next_number(kind: Hashable) -> int:
    """The number for the parameter of a new one-parameter optimizer; counts up for each `kind` of optimizer.

    Args:
        kind: the optimizer's class and settings. Optimizers of different kinds are runs to be compared with each other.
    """
    _constructed[kind] += 1
    return _constructed[kind] - 1


def reset_numbers() -> None:
    """Start at 0 again. Called in every step: optimizers constructed after a step belong to another run."""
    _constructed.clear()
