"""Does the distance from FP32 grow with the size of the model?

Models of growing width and depth train on equally many bytes per parameter in about equally many steps, so that batches
grow with the model, at a rate that falls with the square root of the width. It rises at first, and then falls to a
tenth, as in pre-training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import linregress, norm, t

from benchmarks.evidence import text
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.modes import MODES
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.replicas import Replicas, Shape
from benchmarks.evidence.statistics import CONFIDENCE, POWER, paired, verdict
from benchmarks.evidence.training import Training

LIMIT = 0.01
"""Nats per byte, 1% of perplexity: differences below are called equal."""
LARGE = 1_000_000_000
"""Parameters of a model that nobody trains several times."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        modes: names in `MODES`, FP32 first.
        models: width, layers and number of seeds of each size, ascending.
        bytes_per_parameter: to train on.
        steps: about how many; a batch has at least one sequence.
        length: bytes per sequence.
        lr: the largest rate at a width of 32.
    """

    modes: tuple[str, ...] = ("fp32", "autocast", "split", "sr")
    models: tuple[tuple[int, int, int], ...] = ((32, 3, 10), (56, 3, 10), (84, 3, 6), (136, 4, 4))
    bytes_per_parameter: int = 4
    steps: int = 2000
    length: int = 64
    lr: float = 3e-3

    def shape(self, width: int, layers: int) -> Shape:
        """The shape of a model."""
        return Shape(width=width, layers=layers, length=self.length)


HOUR = Settings(models=((32, 3, 5), (56, 3, 5), (84, 3, 5)), bytes_per_parameter=2, steps=1000)
FULL = Settings(
    models=((84, 3, 5), (136, 4, 5), (200, 6, 5), (320, 8, 5), (512, 9, 5)), bytes_per_parameter=20, steps=10_000
)


def cases(settings: Settings) -> list[str]:
    """Every mode at every size, small models first."""
    return [f"{mode} {width}x{layers}" for width, layers, _ in settings.models for mode in settings.modes]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train one size in one mode."""
    mode, size = case.split()
    width, layers, seeds = next(model for model in settings.models if size == f"{model[0]}x{model[1]}")
    shape = settings.shape(width, layers)
    total, names = settings.bytes_per_parameter * shape.parameters(), list(range(seeds))
    batch = max(1, round(total / (settings.steps * settings.length)))
    steps = total // (batch * settings.length)
    data = text.load(work.data)
    sequences = text.Sequences(data, names, batch, settings.length)
    largest, rising = settings.lr * math.sqrt(32 / width), max(1, steps // 50)

    def rate(step: int) -> float:
        return largest * min((step + 1) / rising, 1 - 0.9 * (step - rising) / (steps - rising))

    training = Training(work, case, MODES[mode], Replicas(names, shape), sequences, rate)
    training.load(case)
    points = training.run(steps, {steps // 10, steps // 3})
    return {"parameters": shape.parameters(), "batch": batch, "points": points, "text": data.checksum}


def section(record: dict[str, Any]) -> Section:
    """The difference from FP32 at each size, its slope, and what it would take to see it in a large model."""
    settings, found = Settings(**record["settings"]), record["cases"]
    sizes = [f"{width}x{layers}" for width, layers, _ in settings.models]
    sizes = [size for size in sizes if all(f"{mode} {size}" in found for mode in settings.modes)]
    parameters = [found[f"fp32 {size}"]["parameters"] for size in sizes]
    rows, table, scatter = list[Row](), list[list[str]](), list[list[str]]()
    for mode in settings.modes:
        losses = [np.array(found[f"{mode} {size}"]["points"][-1]["loss"]) for size in sizes]
        exact = [np.array(found[f"fp32 {size}"]["points"][-1]["loss"]) for size in sizes]
        if mode == "fp32":
            table.append([MODES[mode].label, *(f"{each.mean():.4f} ± {each.std(ddof=1):.4f}" for each in exact)])
            continue
        pairs = [paired(*each) for each in zip(losses, exact, strict=True)]
        table.append([MODES[mode].label, *(f"{each.mean:+.4f} ± {each.half:.4f}" for each in pairs)])
        scatter.append([MODES[mode].label, *(f"{each.deviation:.4f}" for each in pairs)])
        verdicts = [verdict(each, LIMIT) for each in pairs]
        worst = max(pairs, key=lambda each: abs(each.mean) + each.half)
        rows.append(
            Row(
                f"{MODES[mode].label}: ends where FP32 does at every size",
                f"at most {abs(worst.mean) + worst.half:.4f} apart; visible: {max(p.visible for p in pairs):.4f}",
                verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts),
            )
        )
        x = np.concatenate([[math.log10(count)] * len(each) for count, each in zip(parameters, losses, strict=True)])
        differences = np.concatenate(losses) - np.concatenate(exact)
        line = linregress(x, differences)
        quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(x) - 2))
        growing = "undecided" if abs(line.slope) < quantile * line.stderr else "yes" if line.slope > 0 else "falls"
        at = math.log10(LARGE)
        ahead = line.intercept + line.slope * at
        residual = float(np.std(differences - line.intercept - line.slope * x, ddof=2))
        half = quantile * residual * math.sqrt(1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
        pairs_needed = max(3, math.ceil(((norm.ppf(POWER) + norm.ppf((1 + CONFIDENCE) / 2)) * residual / LIMIT) ** 2))
        days = 2 * pairs_needed * 6 * settings.bytes_per_parameter * LARGE**2 / (86_400 * 1e15)
        slope = f"{line.slope:+.4f} ± {quantile * line.stderr:.4f} for each tenfold"
        rows.append(Row(f"{MODES[mode].label}: its difference grows with the size", slope, growing))
        rows.append(
            Row(
                f"{MODES[mode].label}: the line through these sizes, continued to {LARGE:,} parameters",
                f"{ahead:+.3f} ± {half:.3f}; with the scatter found here, {pairs_needed} pairs of runs ({days:.0f} "
                f"PFLOP/s-days) would show {LIMIT}",
                verdict(pairs[0]._replace(mean=ahead, half=half), LIMIT),
            )
        )
    words = (
        f"{settings.bytes_per_parameter} bytes per parameter of Python's standard library in about {settings.steps:,} "
        f"steps, AdamW with β₂ = 0.999 and decay 0.1 at a rate of {settings.lr} · √(32 / width), which rises at first "
        f"and falls to a tenth. Validation loss in nats per byte, differences from FP32; the limit is {LIMIT}."
    )
    heads = [f"{count / 1e6:.2f} million" for count in parameters]
    tables = [
        f"Loss of FP32, and mean differences from it:\n\n{markdown_table(['', *heads], table)}",
        f"Standard deviation of the differences over seeds:\n\n{markdown_table(['', *heads], scatter)}",
    ]
    return Section("Size", words, rows, tables)


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("scale", _SIZES, cases, lambda case: [], run, lambda *_: {}, section)
