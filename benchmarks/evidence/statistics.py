"""What paired runs of several seeds say: means with their intervals, scatter, growth, and what would have been seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

LIMIT = 0.01
"""Nats per prediction, 1% of perplexity: differences of losses below are called equal."""
CONFIDENCE = 0.95
"""Of all intervals."""
POWER = 0.8
"""With which the smallest visible difference would have been told from zero."""


class Paired(NamedTuple):
    """Differences of pairs.

    Attributes:
        mean: of the differences.
        half: half of the interval of the mean.
        visible: the smallest difference that would have been told from zero, with the probability `POWER`.
    """

    mean: float
    half: float
    visible: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    def in_full(self) -> str:
        """With the smallest visible difference."""
        return f"{self}; visible: {self.visible:.4f}"


def paired(values: Sequence[float], reference: Sequence[float]) -> Paired:
    """Compare runs of the same seeds: t intervals of normal differences."""
    differences = np.asarray(values) - np.asarray(reference)
    free = len(differences) - 1
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, free))
    visible = (quantile + float(t.ppf(POWER, free))) * error
    return Paired(float(differences.mean()), quantile * error, visible)


def verdict(found: Paired, limit: float = LIMIT) -> str:
    """What the interval says of a mean difference of losses, or of others that are better if they are smaller.

    Returns:
        "equal": the interval lies within ±`limit`. "worse" or "better": it lies beyond the limit on one side. "above"
        or "below": it excludes zero, but not the limit. "undecided": it excludes neither.
    """
    low, high = found.mean - found.half, found.mean + found.half
    if -limit < low and high < limit:
        return "equal"
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


def grows(found: Paired, limit: float = LIMIT / 2) -> str:
    """Decide from the `growth` of differences whether they grow; by default, two tenfolds may add `LIMIT`."""
    words = {"equal": "no", "worse": "yes", "above": "yes", "better": "falls", "below": "falls"}
    return words.get(verdict(found, limit), "undecided")


def growth(steps: Sequence[int], differences: np.ndarray) -> Paired:
    """By how much differences grow for each tenfold number of steps; `differences` has the shape (seeds, steps).

    The slope of each seed's least-squares line is one observation, since the steps of a seed depend on each other.
    """
    x = np.log10(np.asarray(steps, dtype=float))
    x -= x.mean()
    slopes = differences @ x / (x @ x)
    return paired(slopes, np.zeros(len(slopes)))
