"""The numbers about precision that are drawn: what they are called and what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One number about the precision of a step.

    Attributes:
        name: in the metrics file.
        title: for plots and tables.
        meaning: one sentence.
        scale: `share` is an axis from 0 to 1, `zero` one that starts at 0, `log` a logarithmic one.
    """

    name: str
    title: str
    meaning: str
    scale: str


MEASURES = (
    Measure(
        "lost_updates",
        "Lost updates",
        "Share of the weights' changes that rounding did not store: 0 if all was stored, 1 if nothing was.",
        "share",
    ),
    Measure(
        "changed",
        "Changed",
        "Share of the weights that a step changed, of optimizers whose updates are not known.",
        "share",
    ),
    Measure(
        "never_moved",
        "Never moved",
        "Share of the weights whose value, low bits included, is what it was when training began.",
        "share",
    ),
    Measure(
        "compensation_ulps",
        "Compensation",
        "Root mean square, in units of the spacing between neighbouring weights. "
        "Dashed: 0.29, compensations spread evenly over one spacing.",
        "zero",
    ),
    Measure(
        "lost_second_moment",
        "Lost second moment",
        "Share of the second moment's decay that rounding did not store.",
        "share",
    ),
    Measure(
        "lost_weight_decay",
        "Lost weight decay",
        "Share of the weight decay that rounding did not store.",
        "share",
    ),
    Measure(
        "update_to_weight",
        "Update to weight",
        "Root mean square of the updates over that of the weights. "
        "Grey: half a spacing of BF16; rounding to nearest loses smaller updates.",
        "log",
    ),
)
