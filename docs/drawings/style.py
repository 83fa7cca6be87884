"""How every drawing of the documentation looks: two themes, one width, labels on the lines themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 5.0
"""Inches. A phone shows it at three quarters of that, where the text is still 11 pixels high."""

RC = {
    "svg.hashsalt": "hf_lowprec",  # element ids that do not change from run to run
    "path.simplify": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "lines.linewidth": 2.0,
}


@dataclass(frozen=True)
class Theme:
    """The colours of a drawing; the four of the methods can be told apart by the colour-blind (Okabe and Ito)."""

    suffix: str
    ink: str
    faint: str
    fill: str
    fp32: str
    nearest: str
    kahan: str
    stochastic: str


LIGHT = Theme("", "#1f2328", "#6b7280", "#e5e7eb", "#1f2328", "#c24e00", "#0072b2", "#007f5c")
DARK = Theme("-dark", "#e6e9ef", "#a0a7b4", "#3a4050", "#f2f4f8", "#ff9a5a", "#6cc0f5", "#3fd0a0")
THEMES = (LIGHT, DARK)


def figure(theme: Theme, height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A transparent figure of the common width with one column of axes."""
    found = Figure(figsize=(WIDTH, height))
    found.patch.set_alpha(0)
    axes = found.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.tick_params(colors=theme.faint)
        for name in ("title", "xaxis", "yaxis"):
            part = getattr(ax, name)
            (part if name == "title" else part.label).set_color(theme.ink)
        for spine in ax.spines.values():
            spine.set_color(theme.faint)
    return found, axes


def line(ax: Axes, name: str, *values: Any, **options: Any) -> None:
    """A line whose data the SVG holds under the id `name`."""
    (drawn,) = ax.plot(*values, **options)
    drawn.set_gid(name)


def save(drawn: Figure, path: Path) -> None:
    """Write an SVG that is the same, byte for byte, each time."""
    with matplotlib.rc_context(RC):
        drawn.savefig(path, format="svg", transparent=True, metadata={"Date": None})
