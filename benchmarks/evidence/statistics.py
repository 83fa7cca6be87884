"""What paired runs of several seeds say: means with their intervals, scatter, growth, and what would have been seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2, t

CONFIDENCE = 0.95
"""Of all intervals."""
POWER = 0.8
"""With which the smallest visible difference would have been seen."""


class Paired(NamedTuple):
    """Differences of pairs.

    Attributes:
        mean: of the differences.
        half: half of the interval of the mean.
        deviation: standard deviation of the differences.
        low: lower end of the interval of `deviation`.
        high: its upper end.
        visible: the smallest difference that would have been seen, with the probability `POWER`.
    """

    mean: float
    half: float
    deviation: float
    low: float
    high: float
    visible: float


def paired(values: Sequence[float], reference: Sequence[float]) -> Paired:
    """Compare runs of the same seeds: t intervals of the mean, χ² intervals of the scatter, of normal differences."""
    differences = np.asarray(values) - np.asarray(reference)
    count = len(differences)
    deviation, free = float(differences.std(ddof=1)), count - 1
    error = deviation / math.sqrt(count)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, free))
    low, high = (deviation * math.sqrt(free / chi2.ppf(q, free)) for q in ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2))
    visible = (quantile + float(t.ppf(POWER, free))) * error
    return Paired(float(differences.mean()), quantile * error, deviation, float(low), float(high), visible)


def verdict(found: Paired, limit: float) -> str:
    """Whether a mean difference is below `limit`: two one-sided tests at 2.5% each, as the interval says.

    Returns:
        "equal": the interval lies within ±`limit`. "worse" or "better": it lies beyond the limit on one side.
        "undecided": neither.
    """
    low, high = found.mean - found.half, found.mean + found.half
    if -limit < low and high < limit:
        return "equal"
    if low > limit:
        return "worse"
    return "better" if high < -limit else "undecided"


def growth(steps: Sequence[int], differences: np.ndarray) -> Paired:
    """By how much differences grow for each tenfold number of steps; `differences` has the shape (seeds, steps).

    The slope of each seed's least-squares line is one observation, since the steps of a seed depend on each other.
    """
    x = np.log10(np.asarray(steps, dtype=float))
    x -= x.mean()
    slopes = differences @ x / (x @ x)
    return paired(slopes, np.zeros(len(slopes)))
