"""The BF16 numbers around a weight, and how far apart they are at every size of weight."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from style import Theme, figure, line

STEP = 2e-5  # what AdamW moves a weight by at a learning rate of 2e-5


def neighbours(value: float, count: int) -> torch.Tensor:
    """The `count` BF16 numbers around a positive value, on either side, and itself: FP32."""
    pattern = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16)
    return (pattern + torch.arange(-count, count + 1, dtype=torch.int16)).view(torch.bfloat16).float()


def spacing(values: torch.Tensor) -> torch.Tensor:
    """Distance from each positive BF16 number to the next."""
    return (values.view(torch.int16) + 1).view(torch.bfloat16).double() - values.double()


def draw(theme: Theme) -> Figure:
    """Above a piece of the number line, below half the spacing by size of the weight."""
    found, (grid, sizes) = figure(theme, 4.9, rows=2, height_ratios=[1, 2.6])
    found.subplots_adjust(left=0.16, right=0.97, top=0.93, bottom=0.125, hspace=0.75)

    numbers = neighbours(0.02, 1).double().numpy()
    weight = numbers[1]
    grid.set_title("BF16 numbers around 0.02", color=theme.ink)
    line(grid, "numbers", numbers, np.zeros(3), color=theme.faint, marker="|", markersize=18, markeredgewidth=1.6)
    half = (numbers[1] + numbers[2]) / 2
    grid.axvline(half, ymin=0.22, ymax=0.62, color=theme.faint, linestyle=(0, (2, 2)), linewidth=1.2)
    grid.text(half, -0.3, "halfway", color=theme.faint, ha="center", va="top")
    grid.plot([weight], [0], "o", color=theme.kahan, markersize=9)
    grid.text(weight - 6e-6, 0.62, "weight", color=theme.kahan, ha="right", va="bottom")
    arrow = {"arrowstyle": "-|>", "color": theme.nearest, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    grid.annotate("", (weight + STEP, 0.36), (weight, 0.36), arrowprops=arrow)
    grid.text(weight, 0.62, "step of 2e-5", color=theme.nearest, ha="left", va="bottom")
    grid.set_ylim(-0.75, 1.4)
    grid.set_yticks([])
    for side in ("left", "bottom"):
        grid.spines[side].set_visible(False)
    grid.set_xticks(numbers, [f"{x:.5f}" for x in numbers], fontsize=9)
    grid.tick_params(length=0)

    exponents = torch.arange(-12, 1)
    mantissas = 1 + torch.arange(0, 128, 9) / 128
    weights = (2.0 ** exponents[:, None] * mantissas).flatten().to(torch.bfloat16)
    halves = (spacing(weights) / 2).numpy()
    sizes.set_title("A step below half the spacing is lost", color=theme.ink)
    drawn = weights.float().numpy()
    line(sizes, "half-spacing", drawn, halves, color=theme.kahan, drawstyle="steps-post")
    sizes.axhline(STEP, color=theme.nearest, linestyle=(0, (4, 2)))
    sizes.set(xscale="log", yscale="log", xlim=(2**-12, 1), ylim=(2e-7, 1e-2))
    lost = halves > STEP
    sizes.fill_between(drawn, halves, STEP, where=lost, step="post", color=theme.nearest, alpha=0.16, linewidth=0)
    sizes.text(3e-4, 2.7e-5, "a step of 2e-5", color=theme.nearest, ha="left")
    sizes.text(0.012, 1.4e-3, "half the spacing", color=theme.kahan, ha="center")
    sizes.text(0.24, 1.2e-4, "rounded away", color=theme.nearest, ha="center", va="center")
    sizes.text(1.2e-3, 6e-7, "stored", color=theme.ink, ha="center")
    sizes.set_xlabel("size of the weight")
    sizes.set_ylabel("size of a step")
    return found
