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
from scipy.stats import linregress, t

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, all_equal, markdown_table
from benchmarks.evidence.statistics import CONFIDENCE, Paired, grows, paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape


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

    modes: tuple[str, ...] = ("fp32", "autocast", "nearest", "split", "feedback", "sr")
    models: tuple[tuple[int, int, int], ...] = ((32, 3, 10), (56, 3, 10), (84, 3, 6), (136, 4, 4))
    bytes_per_parameter: int = 4
    steps: int = 2000
    length: int = 64
    lr: float = 3e-3

    def shape(self, width: int, layers: int) -> Shape:
        """The shape of a model."""
        return Shape(width=width, layers=layers, length=self.length)


HOUR = Settings(models=((32, 3, 5), (56, 3, 5), (84, 3, 5)), bytes_per_parameter=2, steps=1000)
FULL = Settings(models=(*Settings.models, (200, 6, 4), (264, 7, 3), (320, 8, 3), (512, 9, 3)))


def cases(settings: Settings) -> list[str]:
    """Every mode at every size, large models first, since they take longest."""
    return [f"{mode} {width}x{layers}" for width, layers, _ in reversed(settings.models) for mode in settings.modes]


def reference(case: str) -> str:
    """FP32 at the same size."""
    return f"fp32 {case.split()[1]}"


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
    """The difference from FP32 at each size, and its slope."""
    settings, found = Settings(**record["settings"]), record["cases"]
    measured = [model for model in settings.models if f"fp32 {model[0]}x{model[1]}" in found]
    sizes = [f"{width}x{layers}" for width, layers, _ in measured]
    modes = [mode for mode in settings.modes if all(f"{mode} {size}" in found for size in sizes)]
    parameters = [found[f"fp32 {size}"]["parameters"] for size in sizes]

    def losses(mode: str, size: str) -> np.ndarray:
        return np.array(found[f"{mode} {size}"]["points"][-1]["loss"])

    exact = [losses("fp32", size) for size in sizes]
    rows = list[Row]()
    table = [[MODES["fp32"].label, *(f"{each.mean():.4f}" for each in exact)]]
    for mode in modes[1:]:
        pairs = [paired(losses(mode, size), losses("fp32", size)) for size in sizes]
        table.append([MODES[mode].label, *(f"{each} {verdict(each)}" for each in pairs)])
        rows.append(all_equal(f"{MODES[mode].label}: ends where FP32 does", pairs, "sizes"))
        if len(sizes) > 2:
            slope = _slope(parameters, [losses(mode, size) - losses("fp32", size) for size in sizes])
            claim = f"{MODES[mode].label}: the difference grows with the size (per 10 × parameters)"
            rows.append(Row(claim, str(slope), grows(slope)))
    models = ", ".join(
        f"{count / 1e6:.2f} million ({layers} layers, width {width}, {seeds} seeds, batches of "
        f"{found[f'fp32 {width}x{layers}']['batch']})"
        for count, (width, layers, seeds) in zip(parameters, measured, strict=True)
    )
    words = (
        f"Byte-level transformers train on {settings.bytes_per_parameter} bytes of Python's standard library per "
        f"parameter, in sequences of {settings.length} bytes, for about {settings.steps:,} steps of AdamW with "
        f"β₂ = 0.999 and weight decay 0.1. Numbers of parameters are {models}. The learning rate is {settings.lr} · "
        "√(32 / width); it warms up, then decays to a tenth."
    )
    left = [settings.shape(*model[:2]).parameters() / 1e6 for model in settings.models if model not in measured]
    if left:
        patterns = ",".join(f"* {size}" for size in sizes)
        words += f" Not run yet: {', '.join(f'{count:.1f}' for count in left)} million parameters;"
        words += f' `--cases "{patterns}"` leaves them out.'
    heads = [f"{count / 1e6:.2f} million" for count in parameters]
    slopes = {row.claim.partition(":")[0]: row for row in rows if "grows" in row.claim}
    grown = [label for label, row in slopes.items() if row.verdict == "yes"]
    answer = f"From {parameters[0] / 1e6:.2f} to {parameters[-1] / 1e6:.2f} million parameters, it "
    answer += f"grows with {', '.join(grown)}" if grown else "does not grow"
    answer += ". Its change per 10 × parameters is, in nats/byte: "
    answer += "; ".join(f"{label} {row.ours}" for label, row in slopes.items())
    return Section(
        "Size",
        words,
        rows,
        [],
        question="Does the difference from FP32 grow with the model?",
        answer=f"{answer}.",
        model=heads[-1],
        table=f"FP32's loss, and differences from it, in nats/byte:\n\n{markdown_table(['mode', *heads], table)}",
    )


def _slope(parameters: list[int], differences: list[np.ndarray]) -> Paired:
    """The slope of a straight line over the logarithm of the size."""
    x = np.concatenate([[math.log10(count)] * len(each) for count, each in zip(parameters, differences, strict=True)])
    line = linregress(x, np.concatenate(differences))
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(x) - 2))
    return Paired(line.slope, quantile * line.stderr)


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("scale", _SIZES, cases, run, section, reference=reference, on_gpus=True)
