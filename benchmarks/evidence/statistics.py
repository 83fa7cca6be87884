"""Compare paired runs of several seeds: mean differences, their confidence intervals, and their growth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

LIMIT = 0.005
"""Nats per prediction: differences of losses below are called equal. Chosen when the results were known."""
CONFIDENCE = 0.95
"""Of intervals."""
PRIMARY = 4
"""Primary claims. Their intervals are wider, so that all of them together hold with `CONFIDENCE` (Bonferroni)."""


class Paired(NamedTuple):
    """Differences of pairs.

    Attributes:
        mean: of the differences.
        half: half of the interval of the mean.
    """

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}".replace("-0.0000", "+0.0000")


def paired(values: Sequence[float], reference: Sequence[float], claims: int = 1) -> Paired:
    """Compare runs of the same seeds: t intervals of normal differences.

    Args:
        values: one for each seed.
        reference: the same.
        claims: how many together hold with `CONFIDENCE`.
    """
    differences = np.asarray(values) - np.asarray(reference)
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    quantile = float(t.ppf(1 - (1 - CONFIDENCE) / claims / 2, len(differences) - 1))
    return Paired(float(differences.mean()), quantile * error)


def verdict(found: Paired, limit: float = LIMIT) -> str:
    """What the interval says of a mean difference of losses, or of others that are better if they are smaller.

    Returns:
        "equal": the interval lies within ±`limit`; "equal, above zero" or "equal, below zero" if it excludes zero.
        "worse" or "better": it lies beyond the limit on one side. "above" or "below": it excludes zero, but not the
        limit. "undecided": it excludes neither.
    """
    low, high = found.mean - found.half, found.mean + found.half
    if -limit < low and high < limit:
        return "equal" if low <= 0 <= high else f"equal, {'above' if low > 0 else 'below'} zero"
    if low > 0:
        return "worse" if low > limit else "above"
    if high < 0:
        return "better" if high < -limit else "below"
    return "undecided"


def exceeds(found: Iterable[Paired]) -> str:
    """Decide whether all means are above zero: "yes", "no" if one is below it, or "undecided"."""
    found = list(found)
    if all(each.mean - each.half > 0 for each in found):
        return "yes"
    return "no" if any(each.mean + each.half < 0 for each in found) else "undecided"


def grows(found: Paired, limit: float = LIMIT) -> str:
    """Decide from the `growth` of differences whether they grow, by more than `limit` for each tenfold."""
    words = {"worse": "yes", "above": "yes", "better": "falls", "below": "falls", "undecided": "undecided"}
    return words.get(verdict(found, limit), "no")


def growth(steps: Sequence[int], differences: np.ndarray) -> Paired:
    """By how much differences grow for each tenfold number of steps; `differences` has the shape (seeds, steps).

    The slope of each seed's least-squares line is one observation, since the steps of a seed depend on each other.
    """
    x = np.log10(np.asarray(steps, dtype=float))
    x -= x.mean()
    slopes = differences @ x / (x @ x)
    return paired(slopes, np.zeros(len(slopes)))
