"""A reduce-scatter with FP32 sums, made of an all-to-all: three ranks, three parts of a gradient."""

from __future__ import annotations

from matplotlib.figure import Figure
from style import Theme, figure

RANKS = 3


def draw(theme: Theme) -> Figure:
    """Above what each rank has, below what it receives and sums."""
    found, (ax,) = figure(theme, 4.6)
    found.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    colors = (theme.kahan, theme.nearest, theme.stochastic)
    width, top, middle, bottom = 0.27, 3.05, 1.35, 0.25

    def box(name: str, x: float, y: float, color: str, label: str, height: float = 0.3, wide: float = width) -> None:
        (drawn,) = ax.fill([x, x + wide, x + wide, x], [y, y, y + height, y + height], color=color, linewidth=0)
        drawn.set_gid(name)
        light = theme.suffix == ""
        ax.text(
            x + wide / 2, y + height / 2 - 0.012, label, color="#ffffff" if light else "#15181f",
            ha="center", va="center", fontsize=10,
        )  # fmt: skip

    for rank in range(RANKS):
        left = rank + 0.06
        ax.text(rank + 0.5, 3.52, f"rank {rank}", color=theme.ink, ha="center", weight="bold")
        for part, color in enumerate(colors):
            x = left + part * (width + 0.03)
            box(f"gradient-{rank}-{part}", x, top, color, f"g{rank}")
            received = part + 0.06 + rank * (width + 0.03)
            arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "shrinkA": 1, "shrinkB": 1}
            ends = (received + width / 2, middle + 0.3), (x + width / 2, top)
            ax.annotate("", *ends, arrowprops=arrow)
            box(f"received-{part}-{rank}", received, middle, color, f"g{rank}")
        arrow = {"arrowstyle": "-|>", "color": theme.ink, "linewidth": 1.3}
        ax.annotate("", (rank + 0.5, bottom + 0.32), (rank + 0.5, middle), arrowprops=arrow)
        box(f"mean-{rank}", rank + 0.5 - 0.31, bottom, colors[rank], "mean", wide=0.62)
    note = {"ha": "center", "va": "center", "fontsize": 10, "color": theme.ink}
    pad = {
        "boxstyle": "round,pad=0.3",
        "facecolor": "#ffffff" if theme.suffix == "" else "#1e2129",
        "edgecolor": "none",
    }
    ax.text(1.5, 2.2, "BF16 on the wire: each part goes to its rank", bbox=pad, **note)
    ax.text(1.5, 0.96, "sum in FP32, in rank order; one rounding to BF16", bbox=pad, **note)
    ax.text(1.5, 0.06, "each rank has the mean of its part", **note)
    ax.set(xlim=(0, 3), ylim=(-0.05, 3.75), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return found
