"""AdamW's second moment after gradients have become ten times smaller, at β₂ = 0.999."""

from __future__ import annotations

import functools

import torch
from matplotlib.figure import Figure
from style import Theme, figure, line

import hf_lowprec

LARGE, SMALL = 200, 2000  # steps with gradients of size 1, then of size 0.1
ELEMENTS = 256
STORED = {
    "fp32": {"state_dtype": torch.float32},
    "nearest": {"state_rounding": "nearest"},
    "stochastic": {"state_rounding": "stochastic"},
}


@functools.cache
def moments() -> dict[str, torch.Tensor]:
    """The second moment of every element after each step: `(steps, ELEMENTS)`."""
    weights = {name: torch.zeros(ELEMENTS, dtype=torch.bfloat16, requires_grad=True) for name in STORED}
    groups = [{"params": [weights[name]], **options} for name, options in STORED.items()]
    optimizer = hf_lowprec.AdamW(groups, lr=1e-5, betas=(0.9, 0.999))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in STORED}
    for step in range(LARGE + SMALL):
        for weight in weights.values():
            weight.grad = torch.full_like(weight, 1.0 if step < LARGE else 0.1)
        optimizer.step()
        for name, weight in weights.items():
            found[name].append(optimizer.state[weight]["exp_avg_sq"].to(torch.float32, copy=True))
    return {name: torch.stack(steps) for name, steps in found.items()}


def draw(theme: Theme) -> Figure:
    """One panel with all three."""
    every = slice(None, None, 10)
    steps = torch.arange(1, LARGE + SMALL + 1)[every].numpy()
    values = {name: moment[every].numpy() for name, moment in moments().items()}
    found, (ax,) = figure(theme, 3.5)
    found.subplots_adjust(left=0.13, right=0.97, top=0.9, bottom=0.15)
    ax.set_title("Second moment as gradients drop from 1 to 0.1", color=theme.ink)
    fp32 = values["fp32"][:, 0]
    line(ax, "fp32", steps, fp32, color=theme.fp32, linewidth=5, alpha=0.35)
    for k in range(2):
        one = values["stochastic"][:, k]
        line(ax, f"stochastic-{k}", steps, one, color=theme.stochastic, linewidth=0.8, alpha=0.8)
    line(ax, "stochastic-mean", steps, values["stochastic"].mean(axis=1), color=theme.stochastic)
    line(ax, "nearest", steps, values["nearest"][:, 0], color=theme.nearest)
    ax.text(2180, values["nearest"][-1, 0] + 0.006, "nearest: stalls", color=theme.nearest, ha="right")
    ax.text(1000, 0.113, "FP32 (grey), and the mean of\nstochastic rounding", color=theme.ink, ha="left")
    ax.text(640, 0.05, "single elements, thin", color=theme.stochastic, ha="center", fontsize=10)
    ax.set(xlim=(0, LARGE + SMALL), ylim=(0, 0.215), xlabel="steps")
    ax.set_yticks([0, 0.1, 0.2])
    ax.grid(axis="y", color=theme.fill, linewidth=0.8)
    ax.set_axisbelow(True)
    return found
