"""Who stalls at small learning rates, and who diverges first at large ones?

Fine-tuning: a trained model trains on at constant small rates; what counts is the share of FP32's progress. Training:
random weights train at constant large rates; what counts is the largest rate at which no seed diverges, that is, ends
with a loss above the entropy of single bytes, which a model reaches that learns nothing but how often each byte occurs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.evidence import text
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.modes import MODES
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.replicas import Replicas, Shape
from benchmarks.evidence.training import Training

START = "start"
STALLED = 0.5
"""A mode stalls where it makes less than this share of FP32's progress."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        seeds: how many.
        modes: names in `MODES`.
        rates: constant rates of fine-tuning, ascending.
        large_rates: constant rates of training from random weights, ascending.
        first_steps: of FP32 training before fine-tuning, at a rate that falls from `first_rate` to zero.
        first_rate: see above.
        steps: at each rate.
        shape: of the model.
        sequences: per step and seed.
    """

    seeds: int = 10
    modes: tuple[str, ...] = ("fp32", "autocast", "nearest", "sr", "kahan", "split", "split-int8")
    rates: tuple[float, ...] = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
    large_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32, 0.64)
    first_steps: int = 5000
    first_rate: float = 3e-3
    steps: int = 1000
    shape: Shape = field(default_factory=Shape)
    sequences: int = 2


FULL = Settings(first_steps=100_000, steps=20_000, shape=Shape(width=256, layers=6, length=128), sequences=16)


def cases(settings: Settings) -> list[str]:
    """The first weights, then every mode at every rate."""
    small = [f"tune {mode} {rate:g}" for rate in settings.rates for mode in settings.modes]
    return [START, *small, *(f"train {mode} {rate:g}" for rate in settings.large_rates for mode in settings.modes)]


def needs(case: str) -> list[str]:
    """Fine-tuning begins with weights that were trained."""
    return [START] if case.startswith("tune") else []


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train at one rate; returns the validation losses of all seeds before the first step and after the last."""
    seeds = list(range(settings.seeds))
    model, data = Replicas(seeds, settings.shape), text.load(work.data)
    kind, name, rate = case.split() if case != START else (START, "fp32", settings.first_rate)
    sequences = text.Sequences(data, seeds, settings.sequences, settings.shape.length)
    first = settings.first_steps if kind == "tune" else 0
    last = settings.first_steps if kind == START else first + settings.steps
    if kind == "tune":
        model.load_state_dict(work.load(START)["model"])

    def rates(step: int) -> float:
        return float(rate) * (1 - step / last if kind == START else 1)

    training = Training(work, case, MODES[name], model, sequences, rates)
    training.step = first
    before = training.validation().tolist()
    after = training.run(last)[-1]["loss"]
    finite = [loss if np.isfinite(loss) else None for loss in after]
    return {"before": before, "after": finite, "text": data.checksum, "entropy": text.entropy(data)}


def section(record: dict[str, Any]) -> Section:
    """The share of FP32's progress at small rates, and the largest rates at which nobody diverges."""
    settings = Settings(**{**record["settings"], "shape": Shape(**record["settings"]["shape"])})
    found = record["cases"]
    after = {c: np.array([np.inf if x is None else x for x in each["after"]]) for c, each in found.items()}
    progress = {case: np.array(each["before"]) - after[case] for case, each in found.items()}
    rows, shares, ends, largest = list[Row](), list[list[str]](), list[list[str]](), dict[str, float]()
    for mode in (mode for mode in settings.modes if all(c in found for c in cases(settings) if f" {mode} " in c)):
        of_rates = [progress[f"tune {mode} {rate:g}"].mean() for rate in settings.rates]
        of_fp32 = [progress[f"tune fp32 {rate:g}"].mean() for rate in settings.rates]
        ratios = [float(own / exact) for own, exact in zip(of_rates, of_fp32, strict=True)]
        shares.append([MODES[mode].label, *(f"{ratio:.2f}" for ratio in ratios)])
        stalled = [rate for rate, ratio in zip(settings.rates, ratios, strict=True) if ratio < STALLED]
        losses = {rate: after[f"train {mode} {rate:g}"] for rate in settings.large_rates}
        diverged = {rate: int((~(each < found[START]["entropy"])).sum()) for rate, each in losses.items()}
        good = [rate for rate in settings.large_rates if not diverged[rate]]
        largest[mode] = max(good, default=0.0)
        cells = (f"{diverged[rate]} diverge" if diverged[rate] else f"{losses[rate].mean():.3f}" for rate in losses)
        ends.append([MODES[mode].label, *cells])
        if mode != "fp32":
            where = f"stalls at {', '.join(f'{rate:g}' for rate in stalled)}" if stalled else "stalls nowhere"
            claim = f"{MODES[mode].label}: at least half of FP32's progress at small rates"
            rows.append(Row(claim, where, "no" if stalled else "yes"))
    if largest.get("autocast") and "sr" in largest:
        ratio = largest["sr"] / largest["autocast"]
        rows.append(
            Row(
                "stochastic rounding trains at 2 to 4 times the largest rate of mixed precision",
                f"{ratio:.1f} times: {largest['sr']:g} against {largest['autocast']:g}",
                "yes" if 2 <= ratio <= 4 else "no",
                "Ozkara et al., as summaries have it",
                "2 to 4 times",
            )
        )
    words = (
        f"{settings.shape.parameters():,} parameters, {settings.seeds} seeds, {settings.steps:,} steps at each rate. "
        f"Fine-tuning begins after {settings.first_steps:,} steps of FP32. A seed diverges if its loss ends above "
        f"{found[START]['entropy']:.3f} nats per byte."
    )
    tables = [
        f"Share of FP32's progress in fine-tuning:\n\n{_table(settings.rates, shares)}",
        f"Final loss of training from random weights:\n\n{_table(settings.large_rates, ends)}",
    ]
    return Section("Learning rates", words, rows, tables)


def _table(rates: tuple[float, ...], rows: list[list[str]]) -> str:
    return markdown_table(["", *(f"{rate:g}" for rate in rates)], rows)


_SIZES = {"hour": Settings(seeds=5, steps=500), "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("learning-rates", _SIZES, cases, needs, run, lambda *_: {}, section)
