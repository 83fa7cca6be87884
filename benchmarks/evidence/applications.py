"""Does it hold for other kinds of models? And what costs quality: BF16 in forward and backward, or in the update?

Five small models of different kinds train at rates that fall to zero. Two further ways separate the causes: autocast,
whose forward and backward are in BF16 and whose updates are in FP32, and training in FP32 that rounds nothing but the
weights after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence import tasks, text
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.modes import MODES
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.replicas import Replicas, Shape
from benchmarks.evidence.statistics import Paired, paired, verdict
from benchmarks.evidence.training import Training

USED = ("fp32", "autocast", "rounded", "nearest", "sr", "kahan", "split")
LIMIT = 0.01
"""Nats per prediction, of the validation loss: differences below are called equal."""
LANGUAGE = "language"


@dataclass(frozen=True)
class Task:
    """A model, its data, and how it is trained.

    Attributes:
        words: what it is.
        make: builds the model of one seed.
        arrays: builds the data; `NAME.npz` in `--data-dir` with the same four names replaces it.
        lr: the first rate.
        batch: samples per step and seed.
        options: of the optimizer.
    """

    words: str
    make: Callable[[], nn.Module]
    arrays: Callable[[], tasks.Arrays]
    lr: float
    batch: int
    options: dict[str, Any]


TASKS = {
    "encoder": Task(
        "a transformer that says which module 64 bytes are from",
        tasks.Encoder, tasks.chunks_of_modules, 1e-3, 16, {"weight_decay": 0.1},
    ),
    "images": Task(
        "a convolutional net for digits, with SGD and momentum",
        tasks.ConvolutionalNet, tasks.digits, 0.02, 64, {"algorithm": "SGD", "momentum": 0.9, "weight_decay": 5e-4},
    ),
    "recommender": Task(
        "a recommender with rare embeddings, with SGD", tasks.Recommender, tasks.clicks, 1.0, 128, {"algorithm": "SGD"}
    ),
    "speech": Task(
        "a GRU that names the state behind noisy frames",
        tasks.GRU, tasks.sounds, 2e-3, 16, {"weight_decay": 0.01},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        seeds: how many.
        steps: of each task.
    """

    seeds: int = 10
    steps: dict[str, int] = field(
        default_factory=lambda: {LANGUAGE: 5000, "encoder": 1500, "images": 2000, "recommender": 10_000, "speech": 3000}
    )


HOUR = Settings(5, {LANGUAGE: 2000, "encoder": 400, "images": 600, "recommender": 5000, "speech": 1000})
FULL = Settings(20, {LANGUAGE: 100_000, "encoder": 20_000, "images": 20_000, "recommender": 100_000, "speech": 30_000})


def cases(settings: Settings) -> list[str]:
    """Every task in every mode."""
    return [f"{task} {mode}" for task in settings.steps for mode in USED]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train one task in one mode; returns validation losses, and accuracies if the task has classes."""
    name, mode = case.split()
    seeds, steps, model = list(range(settings.seeds)), settings.steps[name], None
    if name == LANGUAGE:
        shape, lr, options = Shape(), 1e-3, {"weight_decay": 0.1}
        training_model, batches = Replicas(seeds, shape), text.Sequences(text.load(work.data), seeds, 2, shape.length)
    else:
        task = TASKS[name]
        path = work.data / f"{name}.npz" if work.data else None
        arrays = tasks.read(path) if path and path.exists() else task.arrays()
        model, lr, options = tasks.Stacked(task.make, seeds), task.lr, task.options
        training_model, batches = model, tasks.Batches(arrays, seeds, task.batch)
    training = Training(
        work, case, MODES[mode], training_model, batches, lambda step: lr * (1 - step / steps), dict(options)
    )
    training.load(case)
    found = {"loss": training.run(steps)[-1]["loss"]}
    if model is not None:
        with torch.no_grad(), MODES[mode].precision():
            found["accuracy"] = model.accuracies(batches.validation()).tolist()
    return found


def section(record: dict[str, Any]) -> Section:
    """How many tasks each mode ends as FP32 does in, and which rounding costs quality."""
    found = record["cases"]
    names = [name for name in record["settings"]["steps"] if all(f"{name} {mode}" in found for mode in USED)]

    def compared(name: str, mode: str, kind: str = "loss", reference: str = "fp32") -> Paired:
        return paired(found[f"{name} {mode}"][kind], found[f"{name} {reference}"][kind])

    def row(claim: str, mode: str, word: str, source: str = "") -> Row:
        count = sum(verdict(compared(name, mode), LIMIT) == word for name in names)
        held = "yes" if count == len(names) else "in part" if count else "no"
        return Row(claim, f"in {count} of {len(names)} kinds", held, source)

    zamirai = "Zamirai et al., abstract"
    rows = [
        row("weights rounded to nearest: worse than FP32", "nearest", "worse", zamirai),
        row("stochastic: ends where FP32 does", "sr", "equal", zamirai),
        row("Kahan: ends where FP32 does", "kahan", "equal", zamirai),
        row("split: ends where FP32 does", "split", "equal"),
        row("BF16 in forward and backward, updates in FP32: ends where FP32 does", "autocast", "equal"),
        row("FP32, weights rounded to nearest after each step: worse than FP32", "rounded", "worse", zamirai),
    ]
    classified = [name for name in names if name != LANGUAGE]
    points = [100 * compared(name, mode, "accuracy").mean for name in classified for mode in ("sr", "kahan")]
    if points:
        word = "yes" if min(points) >= -0.1 else "no"
        measured = f"{min(points):+.2f} to {max(points):+.2f}"
        claim = "stochastic and Kahan: accuracy in points, less FP32's"
        rows.append(Row(claim, measured, word, zamirai, "−0.1 to +0.2"))
    others = [mode for mode in USED if mode != "fp32"]
    visible = max(compared(name, mode).visible for name in names for mode in ("sr", "kahan", "split"))

    def cell(name: str, mode: str) -> str:
        each = compared(name, mode)
        return f"{each.mean:+.4f} ± {each.half:.4f} {verdict(each, LIMIT)}"

    losses = [
        [name, f"{np.mean(found[f'{name} fp32']['loss']):.4f}", *(cell(name, mode) for mode in others)]
        for name in names
    ]
    accuracies = [
        [
            name,
            f"{np.mean(found[f'{name} fp32']['accuracy']):.2%}",
            *(f"{100 * compared(name, mode, 'accuracy').mean:+.2f}" for mode in others),
        ]
        for name in classified
    ]
    heads = ["", *(MODES[mode].label for mode in ("fp32", *others))]
    kinds = "; ".join(f"{name}: {TASKS[name].words}" for name in classified)
    words = (
        f"{record['settings']['seeds']} seeds each. {LANGUAGE}: the model of the other parts, on bytes of code; "
        f"{kinds}. AdamW, unless SGD is named, at rates that fall to zero. The limit is {LIMIT} nats; the largest "
        f"difference that might not have been seen with stochastic rounding, Kahan or split is {visible:.4f}."
    )
    tables = [
        f"Validation loss of FP32, and differences from it:\n\n{markdown_table(heads, losses)}",
        f"Accuracy of FP32, and mean differences in points:\n\n{markdown_table(heads, accuracies)}",
    ]
    return Section("Other kinds of models", words, rows, tables)


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("applications", _SIZES, cases, lambda case: [], run, lambda *_: {}, section)
