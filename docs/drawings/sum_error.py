"""Error of a mean of BF16 gradients by number of ranks, as `benchmarks.reduction_error` has measured it."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from style import Theme, figure, line

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "reduction-error-2026-11-21.json"


def errors() -> dict[str, dict[int, float]]:
    """Relative error by number of ranks, of independent noise."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["signals"]["0"]
    return {way: {int(n): row[way] for n, row in rows.items()} for way in rows["2"]}


def draw(theme: Theme) -> Figure:
    """A line for each kind of sum."""
    found, (ax,) = figure(theme, 3.6)
    found.subplots_adjust(left=0.14, right=0.97, top=0.91, bottom=0.15)
    ax.set_title("Relative error of the mean gradient", color=theme.ink)
    measured = errors()
    shown = (("BF16 ring", theme.nearest, "s"), ("BF16 tree", theme.stochastic, "^"), ("ours", theme.kahan, "o"))
    for way, color, marker in shown:
        ranks, values = zip(*measured[way].items(), strict=True)
        line(ax, way.replace(" ", "-"), ranks, values, color=color, marker=marker)
    ax.set(xscale="log", yscale="log", xlabel="ranks", ylim=(1.2e-3, 3.4e-2))
    ax.set_xticks([2, 4, 8, 64, 512], ["2", "4", "8", "64", "512"])
    ax.set_yticks([2e-3, 5e-3, 1e-2, 2e-2], ["0.2%", "0.5%", "1%", "2%"])
    ax.minorticks_off()
    ax.text(62, 1.25e-2, "BF16 ring", color=theme.nearest, ha="right")
    ax.text(512, 6e-3, "BF16 tree", color=theme.stochastic, ha="right")
    ax.text(512, 1.3e-3, "FP32 sum, one rounding (hf_lowprec)", color=theme.kahan, ha="right")
    ax.grid(axis="y", color=theme.fill, linewidth=0.8)
    ax.set_axisbelow(True)
    return found
