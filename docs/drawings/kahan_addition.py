"""One addition of Kahan's: what goes into the weight and what is left in the compensation."""

from __future__ import annotations

import functools

import numpy as np
import torch
from matplotlib.figure import Figure
from style import Theme, figure, line

import hf_lowprec

SPACING = 2.0**-7  # of BF16 numbers between 1 and 2
UPDATES = (0.375, 0.25)  # in spacings; the first leaves the compensation with which the second begins


@functools.cache
def additions() -> list[tuple[float, float]]:
    """Weight and compensation, in spacings above 1, after each update."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    # SGD at a learning rate of 1 adds the negative gradient, exactly.
    optimizer = hf_lowprec.SGD([weight], lr=1.0, rounding="kahan", state_rounding="nearest")
    found = []
    for update in UPDATES:
        weight.grad = torch.full_like(weight, -update * SPACING)
        optimizer.step()
        pair = (weight.item() - 1, optimizer.state[weight]["compensation"].item())
        found.append((pair[0] / SPACING, pair[1] / SPACING))
    return found


def draw(theme: Theme) -> Figure:
    """Four rows, from before the addition to after it, on one number line."""
    (before, owed), (after, left) = additions()
    update = UPDATES[1]
    wanted = before + owed + update
    found, (ax,) = figure(theme, 5.3)
    found.subplots_adjust(left=0.02, right=0.98, top=0.98, bottom=0.09)
    titles = ("before the update", "y = update + compensation", "weight = bf16(weight + y)", "compensation = remainder")
    first, second, third, fourth = 3.9, 2.6, 1.3, 0.0
    for text, y in zip(titles, (first, second, third, fourth), strict=True):
        ax.text(-0.42, y + 0.45, text, color=theme.ink, va="center")
        ax.plot([0, 1], [y, y], color=theme.fill, linewidth=1.2, zorder=0)
        for x, style in ((0, "-"), (0.5, (0, (2, 2))), (1, "-")):
            ax.plot([x, x], [y - 0.22, y + 0.22], color=theme.faint, linewidth=1.2, linestyle=style)
    size = 0.17

    def bar(name: str, y: float, start: float, end: float, color: str, label: str, place: float | None = None) -> None:
        low, high = y - size / 2, y + size / 2
        (box,) = ax.fill([start, end, end, start], [low, low, high, high], color=color, alpha=0.85, linewidth=0)
        box.set_gid(name)
        middle = (start + end) / 2 if place is None else place
        ax.text(middle, y - 0.24, label, color=color, ha="center", va="top", fontsize=10)

    def dot(name: str, x: float, y: float) -> None:
        line(ax, name, np.array([x]), np.array([y]), marker="o", markersize=10, color=theme.kahan, linestyle="")

    bar("owed", first, before, before + owed, theme.stochastic, f"compensation {owed:+g}")
    bar("owed-again", second, before, before + owed, theme.stochastic, "")
    bar("update", second, before + owed, wanted, theme.nearest, f"update {update:+g}")
    dot("weight-before", before, first)
    dot("weight-still", before, second)
    arrow = {"arrowstyle": "-|>", "color": theme.kahan, "linewidth": 2}
    ax.annotate("", (after - 0.04, third), (before + 0.03, third), arrowprops=arrow)
    dot("weight-after", after, third)
    ax.text(after + 0.06, third, "weight +1", color=theme.kahan, va="center", fontsize=10)
    bar("left", fourth, wanted, after, theme.stochastic, f"compensation {left:+g}".replace("-", "−"))
    dot("weight-last", after, fourth)
    ends = np.array([second - 0.5, fourth - 0.1])
    line(ax, "sum", np.full(2, wanted), ends, color=theme.ink, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.text(wanted + 0.02, third + 0.45, "exact sum", color=theme.ink, fontsize=10, va="center")
    ax.set(xlim=(-0.45, 1.5), ylim=(fourth - 0.5, first + 0.75), yticks=[])
    ax.set_xticks([0, 0.5, 1], ["BF16 number", "halfway", "next BF16 number"])
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return found
