"""How far each mode's loss is from FP32's over 100,000 steps, from the record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from style import Theme, figure, line

from benchmarks.evidence.statistics import LIMIT, paired

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "evidence" / "steps-night.json"
RANGE = (-0.01, 0.02)
"""Nats per byte."""


def draw(theme: Theme) -> Figure:
    """One panel: mean differences over seeds with their 95% intervals."""
    cases = json.loads(RECORD.read_text(encoding="utf-8"))["cases"]
    steps = [point["step"] for point in cases["fp32"]["points"]]
    losses = {case: np.array([point["loss"] for point in found["points"]]) for case, found in cases.items()}
    found, (ax,) = figure(theme, 3.9)
    found.subplots_adjust(left=0.13, right=0.97, top=0.9, bottom=0.14)
    ax.set_title("Validation loss, less that of FP32", color=theme.ink)
    ax.axhspan(-LIMIT, LIMIT, color=theme.fill, alpha=0.6, linewidth=0)
    shown = (
        ("sr", theme.nearest, "stochastic rounding without feedback", 0.0152),
        ("feedback", theme.stochastic, "stochastic rounding", -0.0038),
        ("split", theme.kahan, "split", -0.0075),
    )
    for case, color, words, place in shown:
        pairs = [paired(*each) for each in zip(losses[case], losses["fp32"], strict=True)]
        mean, half = (np.array([getattr(each, name) for each in pairs]) for name in ("mean", "half"))
        line(ax, case, steps, mean, color=color)
        ax.fill_between(steps, mean - half, mean + half, color=color, alpha=0.15, linewidth=0)
        ax.text(1100, place, words, color=color)
    nearest = losses["nearest"] - losses["fp32"]
    words = f"rounded to nearest: +{nearest[0].mean():.1f} to +{nearest[-1].mean():.1f}, above ↑"
    ax.text(1100, 0.0178, words, color=theme.nearest)
    ax.set(xscale="log", xlim=(steps[0], steps[-1]), ylim=RANGE, xlabel="steps of AdamW at a constant rate")
    return found
