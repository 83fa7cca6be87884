"""What is summed where: eight ranks, and along each axis of their mesh what travels and how it is added up."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Theme, figure, line

DATA, SPLIT = 4, 2
"""Ranks along the axis of data, and along that of split tensors or of experts."""
BOX, STEP, LEFT, TEXT, ROW = 23, 33, 8, 146, 96
"""Lengths in points, as all coordinates."""


def draw(theme: Theme) -> Figure:
    """A row for each axis: its ranks, linked where something travels, and in words what is added up."""
    ours, torchs, ink, faint = theme.kahan, theme.nearest, theme.ink, theme.faint
    data = (
        ("DDP, FSDP2, HSDP, ZeRO, context", faint),
        ("gradients, sent in BF16:", ink),
        ("FP32 sum in rank order,", ours),
        ("one rounding to BF16", ours),
    )
    tensor = (
        ("activations and their gradients:", ink),
        ("BF16 sum, by torch", torchs),
        ("gradients of matrices: no sum", ink),
        ("of norms inside heads: FP64 sum", ours),
    )
    expert = (
        ("tokens go to their experts: no sum", ink),
        ("gradients of expert A: FP32 sum", ours),
        ("over the ranks that hold A", ours),
    )
    micro_batches = (
        ("by grad_accumulation:", ink),
        ("nearest: BF16, rounded each time", torchs),
        ("kahan: BF16 and a compensation", ours),
        ("fp32: FP32 sum", ours),
    )
    rows = (
        ("8 ranks", "data parallel", data),
        ("8 ranks", "tensor parallel", tensor),
        ("experts A, B", "expert parallel", expert),
        ("in each rank", "micro-batches", micro_batches),
    )
    height = ROW * len(rows) - 4
    found, (ax,) = figure(theme, height / 72)
    found.subplots_adjust(left=0, right=1, top=1, bottom=0)
    ax.set(xlim=(0, 360), ylim=(height, 0))
    ax.set_axis_off()
    width = STEP * (DATA - 1) + BOX
    for row, (caption, axis, lines) in enumerate(rows):
        ax.text(LEFT + width / 2, ROW * row + 8, caption, color=faint, fontsize=10, ha="center", va="top")
        ax.text(TEXT, ROW * row + 8, axis, color=ink, weight="bold", va="top")
        for number, (text, color) in enumerate(lines):
            ax.text(TEXT, ROW * row + 25 + 16 * number, text, color=color, fontsize=10, va="top")

    x = [LEFT + STEP * column for column in range(DATA)]
    y = [[ROW * row + 27 + STEP * split for split in range(SPLIT)] for row in range(len(rows))]
    link = {"color": ours, "linewidth": 4, "solid_capstyle": "butt"}
    for split in range(SPLIT):
        for axis, row in (("data", 0), ("expert", 2)):
            line(ax, f"{axis}-{split}", (x[0] + BOX, x[-1]), [y[row][split] + BOX / 2] * 2, **link)
    for column in range(DATA):
        middle = x[column] + BOX / 2
        line(ax, f"tensor-{column}", (middle, middle), (y[1][0] + BOX, y[1][1]), **link | {"color": torchs})
        for row, style in ((2, "<|-|>"), (3, "-|>")):
            arrow = {"arrowstyle": style, "color": ink, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
            ax.annotate("", (middle, y[row][1]), (middle, y[row][0] + BOX), arrowprops=arrow)
        for split in range(SPLIT):
            rank = str(SPLIT * column + split)
            for axis, row, label in (("data", 0, rank), ("tensor", 1, rank), ("expert", 2, "AB"[split])):
                _box(ax, theme, f"{axis}-rank-{rank}", x[column], y[row][split], label)
        _box(ax, theme, f"micro-batch-{column}", x[column], y[3][0], str(column + 1))
    _box(ax, theme, "gradient", x[0], y[3][1], "gradient", width)
    return found


def _box(ax: Axes, theme: Theme, name: str, x: float, y: float, label: str, width: float = BOX) -> None:
    (drawn,) = ax.fill([x, x + width, x + width, x], [y, y, y + BOX, y + BOX], color=theme.fill, linewidth=0, zorder=3)
    drawn.set_gid(name)
    middle = {"ha": "center", "va": "center_baseline", "zorder": 4}
    ax.text(x + width / 2, y + BOX / 2, label, color=theme.ink, fontsize=10, **middle)
