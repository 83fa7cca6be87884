"""Numbers for the parameters of one-parameter optimizers, such as those that step during the backward pass.

A parameter's number selects its random bits (see `random_bits`). It is the parameter's position in the optimizer, which
would be 0 for every parameter that has its own optimizer: all would round alike, and their errors would add up instead
of averaging out. Such optimizers are therefore numbered in the order of construction.

Optimizers of several parameters all start at 0, so that two runs in one process can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

_constructed: Counter[Hashable] = Counter()
"""One-parameter optimizers constructed since the last step of any optimizer, by kind."""


def next_number(kind: Hashable) -> int:
    """Return the number for the parameter of a new one-parameter optimizer, counting separately for each `kind`.

    Args:
        kind: the optimizer's class and settings. Optimizers of different kinds belong to runs that are compared, so
            they must draw the same bits.
    """
    _constructed[kind] += 1
    return _constructed[kind] - 1


def reset_numbers() -> None:
    """Start at 0 again. Called in every step: optimizers constructed after a step belong to another run."""
    _constructed.clear()
