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

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.statistics import Paired, exceeds, paired, verdict
from benchmarks.evidence.training import tasks, text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape

USED = ("fp32", "autocast", "rounded", "nearest", "feedback", "sr", "kahan", "split")
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
        "a transformer that names the module that contains 64 bytes",
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
    found: dict[str, Any] = {"loss": training.run(steps)[-1]["loss"]}
    if name == LANGUAGE:
        found["text"] = text.load(work.data).checksum
    if model is not None:
        with torch.no_grad(), MODES[mode].precision():
            found["accuracy"] = model.accuracies(batches).tolist()
    return found


def section(record: dict[str, Any]) -> Section:
    """How many tasks each mode ends as FP32 does in, and which rounding costs quality."""
    found = record["cases"]
    names = [name for name in record["settings"]["steps"] if f"{name} fp32" in found]
    modes = [mode for mode in USED[1:] if all(f"{name} {mode}" in found for name in names)]

    def compared(name: str, mode: str, kind: str = "loss") -> Paired:
        return paired(found[f"{name} {mode}"][kind], found[f"{name} fp32"][kind])

    def row(claim: str, mode: str, word: str, source: str = "", published: str = "") -> Row:
        verdicts = [verdict(compared(name, mode)) for name in names]
        count, contrary = sum(each.startswith(word) for each in verdicts), {"equal", "worse", "better"} - {word}
        held = "yes" if count == len(names) else "no" if contrary.intersection(verdicts) else "undecided"
        return Row(claim, f"in {count} of {len(names)} kinds", held, source, published)

    def points(each: Paired) -> str:
        return f"{100 * each.mean:+.2f} ± {100 * each.half:.2f}"

    zamirai, in_tables = "Zamirai et al., abstract", "Zamirai et al., Tables 3 and 4"
    lost = "points lost: ResNet-18 1.22, ResNet-50 8.60, DLRM 1.78 and 1.53, BERT 6.73"
    kept = "points: ResNet-18 -0.05, DLRM -0.01, BERT +0.08"
    claims = (
        ("weights rounded to nearest: worse than FP32", "nearest", "worse", in_tables, lost),
        ("stochastic: ends where FP32 does", "feedback", "equal"),
        ("stochastic without feedback: ends where FP32 does", "sr", "equal", zamirai),
        ("Kahan: ends where FP32 does", "kahan", "equal", zamirai),
        ("split: ends where FP32 does", "split", "equal"),
        ("FP32 weights, autocast: ends where FP32 does", "autocast", "equal", in_tables, kept),
        ("FP32, weights rounded to nearest after each step: worse than FP32", "rounded", "worse", zamirai),
    )
    rows = [row(*claim) for claim in claims if claim[1] in modes]
    classified = [name for name in names if name != LANGUAGE]
    for mode in [mode for mode in PUBLISHED if mode in modes and classified]:
        rows.append(_accuracy_row(mode, [compared(name, mode, "accuracy") for name in classified], in_tables))
    ends = [found.get(f"recommender {mode}", {}).get("accuracy") for mode in ("kahan", "sr")]
    if all(ends):
        gain = paired(*ends)
        claim = "recommender: points of accuracy that Kahan adds to stochastic, with twice the bytes for weights"
        published = "+0.08 (DLRM); up to 0.04 if parameters switch one by one"
        rows.append(Row(claim, points(gain), exceeds([gain]), f"{in_tables}, Figure 5", published))

    def table(kind: str, cell: Callable[[Paired], str], first: str, chosen: list[str]) -> str:
        lines = [
            [
                name,
                first.format(np.mean(found[f"{name} fp32"][kind])),
                *(cell(compared(name, mode, kind)) for mode in modes),
            ]
            for name in chosen
        ]
        return markdown_table(["kind", *(MODES[mode].label for mode in ("fp32", *modes))], lines)

    losses = table("loss", lambda each: f"{each} {verdict(each)}", "{:.4f}", names)
    accuracies = table("accuracy", points, "{:.2%}", classified)
    kinds = "; ".join(f"{name}: {TASKS[name].words}" for name in classified)
    words = (
        f"Each kind has {record['settings']['seeds']} seeds. {LANGUAGE}: the model of the other sections, on bytes of "
        f"code; {kinds}. The optimizer is AdamW unless SGD is named, and learning rates fall to zero. The models of "
        "Zamirai et al. are different and larger."
    )
    ends = {row.claim.partition(":")[0]: row for row in rows if "ends where" in row.claim}
    answer = "; ".join(f"{label} {row.ours}" for label, row in ends.items())
    largest = max(sum(param.numel() for param in TASKS[name].make().parameters()) for name in classified)
    return Section(
        "Other kinds of models",
        words,
        rows,
        [f"Accuracy of FP32, and differences in points:\n\n{accuracies}"],
        question="Do these results hold for other kinds of models?",
        answer=f"The final loss equals FP32's: {answer}.",
        model=f"{largest / 1e6:.2f} million",
        table=f"FP32's validation loss, and differences from it, by kind of model:\n\n{losses}",
    )


PUBLISHED = {"sr": (-0.25, 0.09), "kahan": (-0.09, 0.19)}
"""Accuracy less FP32's of five models, lowest and highest, in points."""


def _accuracy_row(mode: str, found: list[Paired], source: str) -> Row:
    """Compare the accuracy differences from FP32 with the range that the paper reports."""
    low, high = PUBLISHED[mode]
    intervals = [(100 * (each.mean - each.half), 100 * (each.mean + each.half)) for each in found]
    inside = all(low <= first and last <= high for first, last in intervals)
    outside = any(last < low or first > high for first, last in intervals)
    means = [100 * each.mean for each in found]
    half = max(100 * each.half for each in found)
    return Row(
        f"{MODES[mode].label}: accuracy in points, minus FP32's",
        f"{min(means):+.2f} to {max(means):+.2f}, each ± {half:.2f} or less",
        "yes" if inside else "no" if outside else "undecided",
        source,
        f"{low:+} to {high:+}",
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("applications", _SIZES, cases, run, section, reference=lambda case: "* fp32")
