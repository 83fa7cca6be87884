"""A part of what `hf-lowprec plot` draws: loss and lost updates of two short runs, next to each other."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from style import Theme, figure

import hf_lowprec
from hf_lowprec.tools.plotting import figures
from hf_lowprec.tools.plotting.colours import Theme as PlotTheme
from hf_lowprec.tools.plotting.measures import MEASURES
from hf_lowprec.tools.plotting.run_records import RunRecords
from hf_lowprec.tools.plotting.runs import ALL, Run

STEPS, EVERY, LR = 1000, 10, 2e-5
ELEMENTS, DEVIATION, DISTANCE = 20_000, 0.02, 0.005


@functools.cache
def trained(rounding: str) -> Run:
    """A run in which weights move to a target, by noisy gradients and with a cosine schedule."""
    generator = torch.Generator().manual_seed(0)
    start, towards = torch.randn(2, ELEMENTS, generator=generator)
    target = DEVIATION * start + DISTANCE * towards
    weight = torch.nn.Parameter((DEVIATION * start).to(torch.bfloat16))
    optimizer = hf_lowprec.AdamW([weight], lr=LR, rounding=rounding, weight_decay=0.0)
    in_fp32 = torch.nn.Parameter(torch.zeros(ELEMENTS))  # moves by the updates, since it loses nothing
    exact = torch.optim.AdamW([in_fp32], lr=LR, weight_decay=0.0)
    steps: list[dict[str, Any]] = []
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
            steps.append({"step": step, "loss": loss, "precision": {ALL: {"lost_updates": lost}}})
    return Run(rounding, RunRecords(Path(rounding), {}, steps, []))


def stored(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The weights, with their compensation where there is one, in FP32."""
    state = optimizer.state.get(weight, {})
    return weight.detach().float() + state.get("compensation", torch.zeros(ELEMENTS)).float()


def draw(theme: Theme) -> Figure:
    """Two panels, with the plots' own functions."""
    runs = [trained(rounding) for rounding in ("nearest", "kahan")]
    colours = PlotTheme("#ffffff", theme.ink, theme.faint, theme.fill, (theme.nearest, theme.kahan))
    found, (loss, lost) = figure(theme, 3.9, rows=2, sharex=True)
    found.subplots_adjust(left=0.1, right=0.965, top=0.93, bottom=0.12, hspace=0.35)
    figures.draw_loss(loss, runs, colours)
    figures.draw_measure(lost, runs, colours, measure=MEASURES[0], kind=ALL)
    for ax, title in ((loss, "Loss"), (lost, MEASURES[0].title)):
        ax.set_title(title, color=theme.ink)
        ax.grid(axis="y", color=theme.fill, linewidth=0.8)
        ax.set_axisbelow(True)
        for line in ax.lines:
            line.set(linewidth=2.0, alpha=1)
    loss.text(700, 0.68, "nearest", color=theme.nearest)
    loss.text(700, 0.17, "kahan", color=theme.kahan)
    lost.set(xlabel="step", xlim=(0, STEPS))
    return found
