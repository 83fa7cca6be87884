"""Who stalls at small learning rates, and who diverges first at large ones?

Fine-tuning: a trained model trains on at constant small rates; what counts is the share of FP32's progress. Training:
random weights train at constant large rates; what counts is the largest rate at which no seed diverges, that is, ends
with a loss above the entropy of single bytes, which a model reaches that learns nothing but how often each byte occurs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.evidence.experiments.steps import snapshot
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, describe, markdown_table
from benchmarks.evidence.statistics import exceeds, paired
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape
from hf_lowprec import fp32_state_dict

START = "start"
ROUNDED = "rounded"
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
    modes: tuple[str, ...] = ("fp32", "autocast", "nearest", "feedback", "sr", "kahan", "split", "split-int8")
    rates: tuple[float, ...] = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
    large_rates: tuple[float, ...] = (1e-3, 4e-3, 8e-3, 0.012, 0.017, 0.024, 0.034, 0.048, 0.068, 0.096, 0.135, 0.19)
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
    training.load(case)
    before = training.validation().tolist()
    after = training.run(last)[-1]["loss"]
    if kind != "train":
        exact = fp32_state_dict(model, training.optimizer) if MODES[name].rounding else model.state_dict()
        snapshot((exact[name] for name, _ in model.named_parameters()), work.path(case, "npy"))
    finite = [loss if np.isfinite(loss) else None for loss in after]
    return {"before": before, "after": finite, "text": data.checksum, "entropy": text.entropy(data)}


def compare(settings: Settings, work: Workspace, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far weights are from FP32's after fine-tuning, relative to how far these have moved; of each seed.

    And how far the first weights are from themselves, rounded to BF16.
    """
    found: dict[str, list[float]] = {}
    for rate in settings.rates:
        paths = {name: work.path(f"tune {name} {rate:g}", "npy") for name in settings.modes}
        if not (work.path(START, "npy").exists() and paths["fp32"].exists()):
            continue
        first, exact = np.load(work.path(START, "npy")), np.load(paths["fp32"])
        weights = {f"tune {name} {rate:g}": np.load(path) - exact for name, path in paths.items() if path.exists()}
        weights[f"{ROUNDED} {rate:g}"] = torch.from_numpy(first).bfloat16().float().numpy() - first
        moved = np.linalg.norm(exact - first, axis=1)
        found |= {case: (np.linalg.norm(apart, axis=1) / moved).tolist() for case, apart in weights.items()}
    return {"distance": found}


def section(record: dict[str, Any]) -> Section:
    """The share of FP32's progress at small rates, and the largest rates at which nobody diverges."""
    settings, found = Settings(**{**record["settings"], "shape": Shape(**record["settings"]["shape"])}), record["cases"]
    after = {c: np.array([np.inf if x is None else x for x in each["after"]]) for c, each in found.items()}
    gains = {case: np.array(each["before"]) - after[case] for case, each in found.items()}
    modes = [mode for mode in settings.modes if all(c in found for c in cases(settings) if f" {mode} " in c)]
    rows, shares, ends, largest = list[Row](), list[list[str]](), list[list[str]](), dict[str, int]()
    best, zeros = dict[str, int](), np.zeros(settings.seeds)
    for mode in modes:
        stalled, open_, cells = list[str](), list[str](), list[str]()
        for rate in settings.rates:
            own, exact = gains[f"tune {mode} {rate:g}"], gains[f"tune fp32 {rate:g}"]
            learns = paired(exact, zeros)
            if learns.mean - learns.half <= 0:
                cells.append("–")  # FP32 makes no progress to compare with
                continue
            cells.append(f"{own.mean() / exact.mean():.2f}")
            learned = exceeds([paired(own, STALLED * exact)])
            if learned != "yes":
                (stalled if learned == "no" else open_).append(f"{rate:g}")
        shares.append([MODES[mode].label, *cells])
        losses = [after[f"train {mode} {rate:g}"] for rate in settings.large_rates]
        diverged = [int((~(each < found[START]["entropy"])).sum()) for each in losses]
        largest[mode] = next((k for k, count in enumerate(diverged) if count), len(diverged)) - 1
        ends.append([
            MODES[mode].label,
            *(f"{n} diverge" if n else f"{each.mean():.3f}" for n, each in zip(diverged, losses, strict=True)),
        ])  # fmt: skip
        best[mode] = min(range(largest[mode] + 1), key=lambda k: losses[k].mean(), default=-1)
        if mode != "fp32":
            measured = f"stalls at {', '.join(stalled)}" if stalled else "stalls nowhere"
            measured += f"; undecided at {', '.join(open_)}" if open_ else ""
            claim = f"{MODES[mode].label}: at least half of FP32's progress at every small rate"
            rows.append(Row(claim, measured, "no" if stalled else "undecided" if open_ else "yes"))
    if {"autocast", "sr"} <= largest.keys() and min(largest["autocast"], largest["sr"]) >= 0:
        rates = ((settings.large_rates[k["sr"]], settings.large_rates[k["autocast"]]) for k in (best, largest))
        rows += _claims_of_ozkara(*rates, settings)
    shares.insert(0, ["FP32's progress, nats/byte", *(
        f"{gains[f'tune fp32 {rate:g}'].mean():.1e}" for rate in settings.rates
    )])  # fmt: skip
    words = (
        f"{describe(record['settings'])} There are {settings.steps:,} steps at each learning rate. Fine-tuning "
        f"begins after {settings.first_steps:,} steps in FP32. A mode stalls where it makes less than half of FP32's "
        "progress. At the smallest learning rates, progress is so small that shares are uncertain by half or more. A "
        f"seed counts as diverged if its loss ends above {found[START]['entropy']:.3f}, the entropy of single bytes."
    )
    apart = record["compared"].get("distance", {})
    labels = {f"tune {mode}": MODES[mode].label for mode in modes[1:]}
    labels[ROUNDED] = "the first weights rounded to BF16, without training"
    distances = [
        [label, *(f"{np.mean(apart[f'{case} {rate:g}']):.3f}" for rate in settings.rates)]
        for case, label in labels.items()
        if all(f"{case} {rate:g}" in apart for rate in settings.rates)
    ]
    tables = [
        *([f"{_DISTANCE}\n\n{_table(settings.rates, distances)}"] if distances else []),
        f"Final loss from random weights, in nats/byte, by learning rate:\n\n{_table(settings.large_rates, ends)}",
    ]
    usual = next((rate for rate in settings.rates if rate >= 1e-6), settings.rates[-1])
    progress = {label: cells[settings.rates.index(usual)] for label, *cells in shares}
    answer = "; ".join(
        f"{MODES[mode].label} {progress[MODES[mode].label]}"
        for mode in ("nearest", "feedback", "split")
        if MODES[mode].label in progress
    )
    return Section(
        "Learning rates",
        words,
        rows,
        tables,
        question="Which modes stall at small learning rates?",
        answer=f"At {usual:g}, the modes make this share of FP32's progress: {answer}.",
        model=f"{settings.shape.parameters() / 1e6:.2f} million",
        figure=("evidence-learning-rates", _PICTURE) if distances else ("", ""),
        table=f"Progress in fine-tuning, as a share of FP32's, by learning rate:\n\n{_table(settings.rates, shares)}",
    )


_DISTANCE = "Distance from FP32's weights after fine-tuning, relative to how far these moved, by learning rate:"
_PICTURE = "Distance from FP32's weights by learning rate, for nearest, stochastic with and without feedback, and split"


def _claims_of_ozkara(best: tuple[float, float], largest: tuple[float, float], settings: Settings) -> list[Row]:
    """Check rates of stochastic rounding and of mixed precision, to within one step of the grid of rates."""
    notch = settings.large_rates[-1] / settings.large_rates[-2]

    def row(claim: str, rates: tuple[float, float], low: float, high: float, published: str) -> Row:
        ratio = rates[0] / rates[1]
        inside = [low <= ratio * factor <= high for factor in (1 / notch, 1, notch)]
        return Row(
            claim,
            f"{ratio:.1f} times: {rates[0]:g} against {rates[1]:g}, on a grid in steps of {notch:.1f} times or more",
            "yes" if all(inside) else "undecided" if any(inside) else "no",
            "Ozkara et al., table of rates",
            published,
        )

    tuned = "1 to 3.5 times tuned O1; 2 to 4.6 times its default"
    return [
        row("stochastic without feedback: best learning rate, as a multiple of autocast's", best, 1, 3.5, tuned),
        row(
            "stochastic without feedback trains at learning rates at which autocast diverges",
            largest, notch, math.inf, "O1 does not converge at this rate: 3 of 5 models",
        ),
    ]  # fmt: skip


def _table(rates: tuple[float, ...], rows: list[list[str]]) -> str:
    return markdown_table(["mode", *(f"{rate:g}" for rate in rates)], rows)


_SIZES = {"hour": Settings(seeds=5, steps=500), "night": Settings(), "full": FULL}
EXPERIMENT = Experiment(
    "learning-rates",
    _SIZES,
    cases,
    run,
    section,
    reference=lambda case: "* fp32 *",
    needs=needs,
    compare=compare,
)
