"""The share of FP32's progress that each mode makes in fine-tuning, by learning rate, from the record."""

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
    cases, rates = record["cases"], record["settings"]["rates"]

    def progress(mode: str) -> np.ndarray:
        runs = (cases[f"tune {mode} {rate:g}"] for rate in rates)
        return np.array([np.mean(np.subtract(run["before"], run["after"])) for run in runs])

    found, (ax,) = figure(theme, 3.4)
    found.subplots_adjust(left=0.12, right=0.97, top=0.89, bottom=0.17)
    ax.set_title("Progress in fine-tuning, as a share of FP32's", color=theme.ink)
    ax.axhline(1, color=theme.fp32, linewidth=0.8, alpha=0.5)
    shown = (
        ("nearest", theme.nearest, "rounded to nearest", (3e-6, 0.2)),
        ("feedback", theme.stochastic, "stochastic", (1.9e-7, 1.2)),
        ("sr", theme.stochastic, "stochastic without feedback, dotted", (1.9e-7, 0.6)),
        ("split", theme.kahan, "split", (3e-6, 0.85)),
    )
    for mode, color, words, place in (each for each in shown if f"tune {each[0]} {rates[0]:g}" in cases):
        style = {"linestyle": (0, (1, 1.5))} if mode == "sr" else {}
        line(ax, mode, rates, progress(mode) / progress("fp32"), color=color, **style)
        ax.text(*place, words, color=color)
    ax.set(xscale="log", xlim=(rates[0], rates[-1]), ylim=(-0.1, 1.3), xlabel="learning rate")
    return found
