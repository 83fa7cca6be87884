"""How many steps does a weight need to reach its target? The toys of Ozkara et al., §2.2.

First, a weight is one spacing away: two updates of half a spacing take it there in FP32. Those that stochastic rounding
lost are made up for with updates of ε spacings, so that P(T ≤ 2) = 3/4, P(T = n) = (1 − ε)^(n − 3) ε / 4 for n ≥ 3, and
E[T] = 3/2 + 1/(4ε).

Second, Adam goes from 2 to 3 on a slope of −1, behind which the gradient is zero, at a rate that decays to 1e-5. FP32
arrives after 4600 steps, BF16 after 7700 on average over 100 runs; if it decays to 5e-5, after about 4600. The paper
does not print the schedule. Each one here is as long as it must be for FP32 to take 4600 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from hf_lowprec.optim import SGD, Adam

MODES: dict[str, dict[str, Any]] = {
    "fp32": {"rounding": "nearest"},
    "sr": {"rounding": "stochastic", "error_feedback": False},
    "feedback": {"rounding": "stochastic"},
}
GAP, SHAPES = "gap", ("linear", "cosine", "exponential")
"""The first toy, and the schedules of the second."""
SPACING = 2.0**-7
"""Of BF16 numbers between 1 and 2; between 2 and 4, it is twice as large."""
FP32_STEPS, PUBLISHED, LONGEST, RUNS = 4600, {1e-5: 7700, 5e-5: 4600}, 40_000, 100
"""Of the paper: FP32's steps, those of stochastic rounding by last rate, those of the slowest run, and its runs."""
WIDE, SURE = 2.0, 3.0
"""Standard errors within which a printed mean, and a formula, are called reproduced."""


@dataclass(frozen=True)
class Settings:
    """Settings of the toys.

    Attributes:
        runs: of each case; the paper's are 100.
        last_updates: ε of the first toy.
        starts: first rates of the second, chosen after a look at 14 of them in nine shapes.
    """

    runs: int = 2000
    last_updates: tuple[float, ...] = (1 / 4, 1 / 16, 1 / 64)
    starts: tuple[float, ...] = (3e-4, 1e-3)


def decay(shape: str, first: float, last: float, length: float) -> Callable[[int], float]:
    """The rate of each step, which falls from `first` to `last` over `length` steps and stays there."""

    def rate(step: int) -> float:
        done = min(step / length, 1)
        if shape == "exponential":
            return first * (last / first) ** done
        left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
        return last + (first - last) * left

    return rate


def length(shape: str, first: float) -> int:
    """Of the shortest schedule with which FP32 arrives in 4600 steps at the smaller last rate."""
    low, high = 1, 100 * FP32_STEPS
    while low < high:
        middle = (low + high) // 2
        rate = decay(shape, first, min(PUBLISHED), middle)
        low, high = (low, middle) if sum(map(rate, range(FP32_STEPS))) >= 1 else (middle + 1, high)
    return low


def arrivals(
    optimizer: torch.optim.Optimizer, weights: nn.Parameter, goal: float, rate: Callable[[int], float]
) -> torch.Tensor:
    """The number of steps after which each weight has reached `goal` on a slope of −1 that ends there."""
    found, step, (group,) = torch.zeros(len(weights), dtype=torch.long), 0, optimizer.param_groups
    group["initial_lr"] = rate(0)  # as torch's schedulers do; error feedback depends on it
    while not found.all():
        group["lr"] = rate(step)
        weights.grad = -(weights.detach() < goal).to(weights.dtype)
        optimizer.step()
        step += 1
        found[(found == 0) & (weights.detach() >= goal)] = step
    return found


def cases(settings: Settings) -> list[str]:
    """Every mode in both toys; the first has nothing to feed an error back to."""
    slopes = [f"{shape} {first:g} {last:g}" for shape in SHAPES for first in settings.starts for last in PUBLISHED]
    gaps = [f"{GAP} {last:g} {mode}" for last in settings.last_updates for mode in ("fp32", "sr")]
    return [*gaps, *(f"{slope} {mode}" for slope in slopes for mode in MODES)]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """The mean number of steps, its standard deviation, and the largest of each 100 runs."""
    kind, *rates, mode = case.split()
    dtype, start = torch.float32 if mode == "fp32" else torch.bfloat16, 1.0 if kind == GAP else 2.0
    weights = nn.Parameter(torch.full((settings.runs,), start, dtype=dtype))
    if kind == GAP:
        optimizer: torch.optim.Optimizer = SGD([weights], **MODES[mode])
        found = arrivals(optimizer, weights, 1 + SPACING, lambda step: SPACING * (0.5 if step < 2 else float(rates[0])))
    else:
        first, last = map(float, rates)
        optimizer = Adam([weights], **MODES[mode])
        found = arrivals(optimizer, weights, 3.0, decay(kind, first, last, length(kind, first)))
    steps = found.double()
    work.progress(f"{case}: {float(steps.mean()):.1f}")
    return {
        "mean": float(steps.mean()),
        "deviation": float(steps.std()),
        "largest": [int(each.max()) for each in found.split(RUNS)],
    }


def section(record: dict[str, Any]) -> Section:
    """Compare the published numbers of steps with those measured for each schedule."""
    settings, found = record["settings"], record["cases"]
    runs, rows, source = settings["runs"], list[Row](), "Ozkara et al., §2.2"
    means = {case: each["mean"] for case, each in found.items()}
    for last in [last for last in settings["last_updates"] if f"{GAP} {last:g} sr" in found]:
        case, expected = f"{GAP} {last:g} sr", 1.5 + 1 / (4 * last)
        error = found[case]["deviation"] / math.sqrt(runs)
        rows.append(
            Row(
                f"updates of ½, ½ and then {last:g} spacings: mean steps for one spacing; FP32 takes 2",
                f"{means[case]:.2f} ± {2 * error:.2f}; FP32: {means.get(f'{GAP} {last:g} fp32', math.nan):g}",
                "holds" if abs(means[case] - expected) <= SURE * error else "does not hold",
                source,
                f"{expected:g}, from P(T = n)",
            )
        )
    slopes = [f"{shape} {first:g}" for shape in SHAPES for first in settings["starts"]]
    slopes = [s for s in slopes if all(f"{s} {last:g} {mode}" in found for last in PUBLISHED for mode in MODES)]
    reproduced = {
        last: [
            slope
            for slope in slopes
            if abs(means[f"{slope} {last:g} sr"] - steps)
            <= WIDE * found[f"{slope} {last:g} sr"]["deviation"] / math.sqrt(RUNS)
        ]
        for last, steps in PUBLISHED.items()
    }
    for last, steps in PUBLISHED.items() if slopes else ():
        own = [means[f"{slope} {last:g} sr"] for slope in slopes]
        claim = f"stochastic rounding without feedback, last rate {last:g}: mean steps"
        by = f"reproduced with {len(reproduced[last])} of {len(slopes)} schedules"
        by += f": {', '.join(reproduced[last])}" * bool(reproduced[last])
        measured = f"{min(own):,.0f} to {max(own):,.0f}; {by}"
        rows.append(Row(claim, measured, "holds" if reproduced[last] else "does not hold", source, f"{steps:,}"))
    if slopes:
        last = min(PUBLISHED)
        largest = np.array([found[f"{slope} {last:g} sr"]["largest"] for slope in slopes])
        measured = f"{largest.min():,} to {largest.max():,}; {np.mean(largest >= LONGEST):.0%} reach {LONGEST:,}"
        held = "holds" if largest.min() <= LONGEST <= largest.max() else "does not hold"
        rows.append(Row(f"the slowest of {RUNS} runs, last rate {last:g}", measured, held, source, f"{LONGEST:,}"))
    for last in PUBLISHED if slopes else ():
        apart = [means[f"{slope} {last:g} feedback"] - means[f"{slope} {last:g} fp32"] for slope in slopes]
        late = 2 * SPACING / last
        claim = f"stochastic rounding, last rate {last:g}: arrives within a spacing's {late:,.0f} steps of FP32"
        held = "yes" if max(map(abs, apart)) <= late else "no"
        rows.append(Row(claim, f"{min(apart):+,.0f} to {max(apart):+,.0f}, by schedule", held))
    table = [
        [
            f"{slope}, over {length(shape, float(first)):,} steps",
            *(f"{means[f'{slope} {last:g} {mode}']:,.0f}" for last in PUBLISHED for mode in MODES),
        ]
        for slope in slopes
        for shape, first in [slope.split()]
    ]
    labels = {"fp32": "FP32", "sr": "stochastic without feedback", "feedback": "stochastic"}
    heads = ["", *(f"{labels[mode]}, to {last:g}" for last in PUBLISHED for mode in MODES)]
    text = (
        f"{runs:,} runs. First, a weight is one spacing away. Then Adam goes from 2 to 3 on a slope of −1, which ends "
        "there, at a rate that decays. The paper does not print the schedule: each one here is as long as it must "
        f"be for FP32 to take the paper's {FP32_STEPS:,} steps at a last rate of {min(PUBLISHED):g}. A mean of "
        f"the paper is reproduced with a schedule if it is within {WIDE:g} standard errors of a mean of {RUNS} runs. "
        "These schedules were chosen after a look at more of them."
    )
    answer = "; ".join(
        f"{label} {min(steps):,.0f} to {max(steps):,.0f}"
        for mode, label in labels.items()
        if (steps := [means[f"{slope} {min(PUBLISHED):g} {mode}"] for slope in slopes])
    )
    return Section(
        "When a weight arrives",
        text,
        rows,
        [f"Mean steps by schedule:\n\n{markdown_table(heads, table)}"],
        question="How many steps does a weight need to reach its target, if updates are far below its spacing?",
        answer=f"If the learning rate decays to {min(PUBLISHED):g}, it takes, depending on the schedule: {answer}.",
        model="1 weight",
    )


EXPERIMENT = Experiment("arrival", {"hour": Settings()}, cases, run, section)
