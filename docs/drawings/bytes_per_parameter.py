"""Bytes per parameter of weight, gradient and states, counted on real optimizers after a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from style import Theme, figure

import hf_lowprec
from hf_lowprec.rounding.modes import LOW_BITS_STATES

ELEMENTS = 1024
PARTS = ("weight", "gradient", "states", "low_bits")


def bars() -> dict[str, tuple[torch.dtype, Callable[[list], torch.optim.Optimizer]]]:
    """Label of each bar, the dtype of its weights and what makes its optimizer."""
    ours = {
        "adamw": (hf_lowprec.AdamW, ("split", "kahan", "split24", "sr")),
        "lion": (hf_lowprec.Lion, ("split", "sr")),
        "sgd": (hf_lowprec.SGD, ("split", "sr")),
    }
    return {"FP32 AdamW": (torch.float32, torch.optim.AdamW)} | {
        f"{name}_bf16_{mode}": (torch.bfloat16, functools.partial(cls, rounding=mode))
        for name, (cls, modes) in ours.items()
        for mode in modes
    }


def counted(dtype: torch.dtype, make: Callable[[list], torch.optim.Optimizer]) -> dict[str, float]:
    """Bytes per element of each of `PARTS`."""
    weight = torch.zeros(ELEMENTS, dtype=dtype, requires_grad=True)
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    sizes = {name: s.nbytes / ELEMENTS for name, s in optimizer.state[weight].items() if s.shape == weight.shape}
    low_bits = sum(sizes.pop(name, 0.0) for name in LOW_BITS_STATES)
    return dict(zip(PARTS, (weight.itemsize, weight.grad.itemsize, sum(sizes.values()), low_bits), strict=True))


def draw(theme: Theme) -> Figure:
    """A stacked bar for each optimizer."""
    found, (ax,) = figure(theme, 4.8)
    found.subplots_adjust(left=0.33, right=0.93, top=0.9, bottom=0.04)
    colors = dict(zip(PARTS, (theme.kahan, theme.nearest, theme.faint, theme.stochastic), strict=True))
    labels = list(bars())
    for row, (dtype, make) in enumerate(bars().values()):
        start = 0.0
        for part, size in counted(dtype, make).items():
            (box,) = ax.barh(row, size, left=start, color=colors[part], height=0.62, edgecolor="none")
            box.set_gid(f"{labels[row]}-{part}")
            start += size
        ax.text(start + 0.25, row, f"{start:g}", color=theme.ink, va="center", weight="bold")
    for x, part in ((2, "weight"), (6, "gradient"), (12, "moments")):
        ax.text(x, -0.5, part, color=colors["states" if part == "moments" else part], ha="center", va="bottom")
    for row, text in ((1, "remainder"), (2, "compensation"), (3, "remainder")):
        ax.text(11.95, row, text, color=colors["low_bits"], ha="left", va="center")
    ax.set(xlim=(0, 16.9), ylim=(len(labels) - 0.5, -0.6), xticks=[])
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(length=0, axis="y", colors=theme.ink)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return found
