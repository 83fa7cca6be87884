"""How far fine-tuned weights are from FP32's in each mode, by learning rate, from the record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from style import Theme, figure, line

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "evidence" / "learning-rates-night.json"


def draw(theme: Theme) -> Figure:
    """One panel."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    apart, rates = record["compared"]["distance"], record["settings"]["rates"]
    found, (ax,) = figure(theme, 3.9)
    found.subplots_adjust(left=0.12, right=0.97, top=0.9, bottom=0.15)
    ax.set_title("Distance from FP32's weights / their displacement", color=theme.ink)
    dotted = {"linestyle": (0, (1, 1.5))}
    shown = (
        ("tune nearest", theme.nearest, "rounded to nearest", (2.0e-5, 1.25), {}),
        ("tune sr", theme.stochastic, "without feedback, dotted", (1.3e-6, 5.0), dotted),
        ("tune feedback", theme.stochastic, "stochastic", (4.4e-5, 0.14), {}),
        ("rounded", theme.faint, "rounding of\nthe first weights", (1.2e-7, 0.6), {}),
        ("tune split", theme.kahan, "split", (2.6e-6, 0.027), {}),
    )
    for case, color, words, place, style in shown:
        distances = [np.mean(apart[f"{case} {rate:g}"]) for rate in rates]
        line(ax, case.replace(" ", "-"), rates, distances, color=color, **style)
        ax.text(*place, words, color=color)
    ax.set(xscale="log", yscale="log", xlim=(rates[0], rates[-1]), ylim=(0.008, 30), xlabel="learning rate")
    return found
