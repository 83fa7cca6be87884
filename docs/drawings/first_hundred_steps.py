"""How far stored weights move in the first steps: with a compensation of zero, and with low bits."""

from __future__ import annotations

import functools

import torch
from matplotlib.figure import Figure
from style import Theme, figure, line
from torch import nn

import hf_lowprec

STEPS, LR = 100, 2e-6
ELEMENTS, DEVIATION = 50_000, 0.02
INITIAL = ("zero", "low_bits")


@functools.cache
def moved() -> dict[str, torch.Tensor]:
    """Mean displacement of the stored weights in the direction of their updates, after each step: `(STEPS + 1,)`."""
    generator = torch.Generator().manual_seed(0)
    exact, mean = torch.randn(2, 1, ELEMENTS, generator=generator).mul_(torch.tensor([DEVIATION, 1.0]).view(2, 1, 1))
    models = {name: nn.Linear(ELEMENTS, 1, bias=False) for name in ("fp32", *INITIAL)}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, model in models.items():
        model.weight.data.copy_(exact)
        if name == "fp32":
            optimizers[name] = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        else:
            hf_lowprec.cast_model(model, keep_low_bits=name == "low_bits")
            optimizers[name] = hf_lowprec.AdamW(model.parameters(), lr=LR, weight_decay=0.0, rounding="kahan")
    starts = {name: model.weight.detach().float() for name, model in models.items()}
    starts["fp32"] = exact
    found = {name: [0.0] for name in models}
    for _ in range(STEPS):
        grad = (mean + torch.randn(1, ELEMENTS, generator=generator)).to(torch.bfloat16)
        for name, model in models.items():
            model.weight.grad = grad.to(model.weight.dtype)
            optimizers[name].step()
            change = model.weight.detach().float() - starts[name]
            found[name].append((change * -mean.sign()).mean().item())
    return {name: torch.tensor(means) for name, means in found.items()}


def draw(theme: Theme) -> Figure:
    """One panel with FP32 and both."""
    steps = torch.arange(STEPS + 1).numpy()
    values = {name: mean.numpy() * 1e4 for name, mean in moved().items()}
    found, (ax,) = figure(theme, 3.7)
    found.subplots_adjust(left=0.12, right=0.97, top=0.9, bottom=0.15)
    ax.set_title("Mean change of the stored weights, × 10⁻⁴", color=theme.ink)
    line(ax, "fp32", steps, values["fp32"], color=theme.fp32, linewidth=5, alpha=0.35, solid_capstyle="round")
    line(ax, "zero", steps, values["zero"], color=theme.nearest)
    line(ax, "low-bits", steps, values["low_bits"], color=theme.kahan)
    ax.text(4, 0.95, "low bits:\non the grey line of FP32", color=theme.kahan)
    ax.text(46, 0.3, "compensation of zero: lags", color=theme.nearest)
    ax.set(xlim=(0, STEPS), ylim=(0, 1.2), xlabel=f"steps of AdamW at a learning rate of {LR:g}".replace("e-06", "e-6"))
    ax.set_yticks([0, 0.5, 1])
    ax.grid(axis="y", color=theme.fill, linewidth=0.8)
    ax.set_axisbelow(True)
    return found
