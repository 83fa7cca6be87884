"""Bytes per parameter of weight, gradient and states, counted on real optimizers after a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Theme, figure

import hf_lowprec
from hf_lowprec.rounding.modes import LOW_BITS_STATES

ROWS = 4096
PARTS = ("weight", "gradient", "states", "low_bits")


Bars = dict[str, tuple[torch.dtype, Callable[[list], torch.optim.Optimizer]]]
"""Label of each bar, the dtype of its weights and what makes its optimizer."""

FP32: Bars = {"FP32 AdamW": (torch.float32, torch.optim.AdamW)}


def every_mode() -> Bars:
    """FP32 and the modes of three optimizers."""
    ours = {
        "adamw": (hf_lowprec.AdamW, ("split", "kahan", "sr")),
        "lion": (hf_lowprec.Lion, ("split", "sr")),
        "sgd": (hf_lowprec.SGD, ("split", "sr")),
    }
    return FP32 | {
        f"{name}_bf16_{mode}": (torch.bfloat16, functools.partial(cls, rounding=mode))
        for name, (cls, modes) in ours.items()
        for mode in modes
    }


def counted(dtype: torch.dtype, make: Callable[[list], torch.optim.Optimizer]) -> dict[str, float]:
    """Bytes per element of each of `PARTS`."""
    weight = torch.zeros(ROWS, ROWS, dtype=dtype, requires_grad=True)
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    sizes = {name: s.nbytes / weight.numel() for name, s in optimizer.state[weight].items() if s.ndim > 0}
    low_bits = sum(sizes.pop(name, 0.0) for name in LOW_BITS_STATES)
    return dict(zip(PARTS, (weight.itemsize, weight.grad.itemsize, sum(sizes.values()), low_bits), strict=True))


def draw(theme: Theme) -> Figure:
    """A stacked bar for each optimizer."""
    found, ax = chart(theme, 4.8, every_mode())
    for row, name in enumerate(every_mode()):
        text = {"split": "remainder", "kahan": "compensation"}.get(name.rpartition("_")[2], "")
        ax.text(11.95, row, text, color=theme.stochastic, ha="left", va="center")
    return found


def chart(theme: Theme, height: float, bars: Bars) -> tuple[Figure, Axes]:
    """Stacked bars, the first of which is FP32's, and the names of its parts above it."""
    found, (ax,) = figure(theme, height)
    found.subplots_adjust(left=0.33, right=0.93, top=1 - 0.48 / height, bottom=0.192 / height)
    colors = dict(zip(PARTS, (theme.kahan, theme.nearest, theme.faint, theme.stochastic), strict=True))
    labels = list(bars)
    for row, (dtype, make) in enumerate(bars.values()):
        start = 0.0
        for part, size in counted(dtype, make).items():
            (box,) = ax.barh(row, size, left=start, color=colors[part], height=0.62, edgecolor="none")
            box.set_gid(f"{labels[row]}-{part}")
            start += size
        ax.text(start + 0.25, row, f"{start:.3g}", color=theme.ink, va="center", weight="bold")
    ax.text(-0.25, -0.5, "bytes per parameter", color=theme.ink, ha="right", va="bottom")
    for x, part in ((2, "weight"), (6, "gradient"), (12, "moments")):
        ax.text(x, -0.5, part, color=colors["states" if part == "moments" else part], ha="center", va="bottom")
    ax.set(xlim=(0, 16.9), ylim=(len(labels) - 0.5, -0.6), xticks=[])
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(length=0, axis="y", colors=theme.ink)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return found, ax
