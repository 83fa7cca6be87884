"""Numbers for parameters that have an optimizer each, as those that step inside of backward.

Random bits belong to a parameter's number (see `random_bits`), which is its position in the optimizer. It would be 0
for all of these: they would round alike, and their errors would add up instead of averaging out.

Optimizers of several parameters all start at 0, so that two trainings in one process can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

_built: Counter[Hashable] = Counter()


def next_number(kind: Hashable) -> int:
    """How many optimizers of one parameter and of this kind were built since a step was last taken."""
    _built[kind] += 1
    return _built[kind] - 1


def start_anew() -> None:
    """Number from 0 again: a step was taken, so what is built from now on belongs to another training."""
    _built.clear()
