"""One weight over a thousand steps of AdamW, stored in BF16 and rounded in four ways, next to FP32."""

from __future__ import annotations

import functools

import torch
from matplotlib.figure import Figure
from style import Theme, figure, line

import hf_lowprec

STEPS, LR = 1000, 2e-5
START = torch.tensor(0.1, dtype=torch.bfloat16).item()
SPACING = 2.0**-11  # of BF16 numbers between 1/16 and 1/8
COPIES = 4096  # of the weight, which differ in their random bits alone


@functools.cache
def trained() -> dict[str, torch.Tensor]:
    """Change of the weight after each step: `(STEPS + 1,)`, or rounded stochastically `(STEPS + 1, COPIES)`."""
    generator = torch.Generator().manual_seed(1)
    # The gradient is noise around a mean that changes its sign, so that the weight turns.
    mean = torch.cos(torch.linspace(0, 1.45 * torch.pi, STEPS)) * -0.5
    grads = (mean + torch.randn(STEPS, generator=generator)).to(torch.bfloat16)
    weights = {"fp32": torch.full((1,), START, requires_grad=True)}
    for name, count in (("nearest", 1), ("kahan", 1), ("stochastic", COPIES), ("feedback", COPIES)):
        weights[name] = torch.full((count,), START, dtype=torch.bfloat16, requires_grad=True)
    adamw = functools.partial(hf_lowprec.AdamW, lr=LR, weight_decay=0.0)
    ours = adamw([{"params": [weights[name]], "rounding": name} for name in ("nearest", "kahan")])
    others = [
        torch.optim.AdamW([weights["fp32"]], lr=LR, weight_decay=0.0),
        adamw([weights["stochastic"]], rounding="stochastic", error_feedback=False),
        adamw([weights["feedback"]], rounding="stochastic"),
    ]
    found = {name: [torch.zeros_like(weight, dtype=torch.float32)] for name, weight in weights.items()}
    found["sum"] = [torch.zeros(1)]
    for grad in grads:
        for weight in weights.values():
            weight.grad = torch.full_like(weight, grad.item())
        for optimizer in (ours, *others):
            optimizer.step()
        for name, weight in weights.items():
            found[name].append(weight.detach().float() - START)
        found["sum"].append(found["kahan"][-1] + ours.state[weights["kahan"]]["compensation"].float())
    return {name: torch.stack(steps).squeeze(1) for name, steps in found.items()}


def draw(theme: Theme) -> Figure:
    """Four panels: nearest, Kahan, and stochastic without and with error feedback, each with FP32."""
    every = slice(None, None, 4)  # as many points as can be seen
    steps = torch.arange(STEPS + 1)[every].numpy()
    values = {name: change[every].numpy() / SPACING for name, change in trained().items()}
    found, axes = figure(theme, 9.0, rows=4, sharex=True)
    found.subplots_adjust(left=0.13, right=0.955, top=0.97, bottom=0.058, hspace=0.28)
    titles = ("Nearest: the weight never moves", "Kahan: weight + compensation follows FP32")
    titles += ("Stochastic alone: runs wander, their mean follows",)
    titles += ("Stochastic with error feedback: each run follows",)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, color=theme.ink)
        ax.set_ylim(-8, 9)
        ax.set_yticks([-4, 0, 4], ["−4", "0", "+4"])
        ax.grid(axis="y", color=theme.fill, linewidth=0.8)
        ax.set_axisbelow(True)
        line(ax, "fp32", steps, values["fp32"], color=theme.fp32, linewidth=4.5, alpha=0.35, solid_capstyle="round")
    nearest, kahan, stochastic, feedback = axes
    line(nearest, "nearest", steps, values["nearest"], color=theme.nearest)
    nearest.text(330, 4.9, "FP32", color=theme.fp32, ha="center")
    nearest.text(330, -2, "BF16 weight", color=theme.nearest, ha="center")
    line(kahan, "kahan", steps, values["kahan"], color=theme.kahan, drawstyle="steps-post", linewidth=1.3)
    line(kahan, "sum", steps, values["sum"], color=theme.kahan, linestyle=(0, (1, 1)), linewidth=2.4)
    kahan.text(330, 5.2, "BF16 weight, in steps", color=theme.kahan, ha="center")
    kahan.text(330, -2, "weight + compensation, dotted", color=theme.kahan, ha="center")
    for ax, name in ((stochastic, "stochastic"), (feedback, "feedback")):
        for k in range(3):
            line(ax, f"{name}-{k}", steps, values[name][:, k], color=theme.stochastic, linewidth=0.8, alpha=0.8)
        line(ax, f"{name}-mean", steps, values[name].mean(axis=1), color=theme.stochastic, linewidth=2.4)
    stochastic.text(330, 6.8, "three runs, thin", color=theme.stochastic, ha="center")
    stochastic.text(330, -3.6, f"mean of {COPIES} runs, thick", color=theme.stochastic, ha="center")
    kahan.set_ylabel("change of the weight, in BF16 spacings")
    feedback.set_xlabel(f"steps of AdamW at a learning rate of {LR:g}".replace("e-05", "e-5"))
    feedback.set_xlim(0, STEPS)
    return found
