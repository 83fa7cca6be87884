"""Loss and lost updates of two short runs, next to each other, as `hf-lowprec plot` draws them of real ones."""

from __future__ import annotations

import functools
import math

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from style import Theme, figure, line

import hf_lowprec

STEPS, EVERY, LR = 1000, 10, 2e-5
ELEMENTS, DEVIATION, DISTANCE = 20_000, 0.02, 0.005


@functools.cache
def trained(rounding: str) -> list[tuple[int, float, float]]:
    """Steps, losses and lost updates of weights that move to a target, by noisy gradients with a cosine schedule."""
    generator = torch.Generator().manual_seed(0)
    start, towards = torch.randn(2, ELEMENTS, generator=generator)
    target = DEVIATION * start + DISTANCE * towards
    weight = torch.nn.Parameter((DEVIATION * start).to(torch.bfloat16))
    optimizer = hf_lowprec.AdamW([weight], lr=LR, rounding=rounding, weight_decay=0.0)
    in_fp32 = torch.nn.Parameter(torch.zeros(ELEMENTS))  # moves by the updates, since it loses nothing
    exact = torch.optim.AdamW([in_fp32], lr=LR, weight_decay=0.0)
    steps: list[tuple[int, float, float]] = []
    for step in range(1, STEPS + 1):
        noise = DISTANCE * torch.randn(ELEMENTS, generator=generator)
        weight.grad = (weight.detach().float() - target + noise).to(torch.bfloat16)
        in_fp32.grad = weight.grad.float()
        before, in_fp32.data = stored(weight, optimizer), torch.zeros(ELEMENTS)
        for each in (optimizer, exact):
            each.param_groups[0]["lr"] = LR * (0.51 + 0.49 * math.cos(math.pi * step / STEPS))
            each.step()
        if step % EVERY == 0:
            update, change = in_fp32.detach(), stored(weight, optimizer) - before
            lost = 1 - (update @ change / (update @ update)).item()
            loss = (weight.detach().double() - target).square().mean().item() / DISTANCE**2
            steps.append((step, loss, lost))
    return steps


def stored(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The weights, with their compensation where there is one, in FP32."""
    state = optimizer.state.get(weight, {})
    return weight.detach().float() + state.get("compensation", torch.zeros(ELEMENTS)).float()


def draw(theme: Theme) -> Figure:
    """Two panels of both runs."""
    found, (loss, lost) = figure(theme, 3.9, rows=2, sharex=True)
    found.subplots_adjust(left=0.13, right=0.95, top=0.93, bottom=0.12, hspace=0.35)
    for rounding, color in (("nearest", theme.nearest), ("kahan", theme.kahan)):
        steps, losses, shares = zip(*trained(rounding), strict=True)
        line(loss, f"loss-{rounding}", steps, losses, color=color)
        line(lost, f"lost-{rounding}", steps, shares, color=color)
    for ax, title in ((loss, "Loss"), (lost, "Lost updates")):
        ax.set_title(title, color=theme.ink)
        ax.grid(axis="y", color=theme.fill, linewidth=0.8)
        ax.set_axisbelow(True)
    loss.text(700, 0.68, "nearest", color=theme.nearest)
    loss.text(700, 0.17, "kahan", color=theme.kahan)
    lost.set(xlabel="step", ylim=(-0.06, 1.06))
    lost.yaxis.set_major_formatter(PercentFormatter(1))
    return found
