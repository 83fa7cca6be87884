"""How much do states of 16 and 8 bits cost, and does it depend on AdamW's β₂?

The second moment keeps a share β₂ of its value at each step. Rounded to nearest, BF16 cannot follow at 0.999, where a
step changes it by less than half the spacing of two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Section, all_equal, describe, markdown_table
from benchmarks.evidence.statistics import paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES, WITHOUT, Mode
from benchmarks.evidence.training.replicas import Replicas, Shape

_STATES = {"FP32": torch.float32, "BF16": torch.bfloat16, "8-bit": torch.int8}
WAYS = {
    "fp32": MODES["fp32"],
    **{
        f"{name}-{states}": Mode(f"{mode.label}, {states} states", mode.rounding, options={"state_dtype": dtype} | more)
        for name, key, more in (("split", "split", {}), ("feedback", "feedback", {}), ("stochastic", "sr", WITHOUT))
        for states, dtype in _STATES.items()
        if (mode := MODES[key])
    },
    "split-factored": Mode("split, factored second moment", "split", options={"factored": True}),
    "feedback-factored": Mode("stochastic, factored second moment", "stochastic", options={"factored": True}),
    "factored-8-bit": MODES["factored-int8"],
    "split-BF16-nearest": Mode("split, BF16 states rounded to nearest", "split", options={"state_rounding": "nearest"}),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        betas: values of β₂.
        seeds: how many.
        steps: at a rate that falls from `lr` to zero.
        shape: of the model.
        sequences: per step and seed.
        lr: the first rate.
    """

    betas: tuple[float, ...] = (0.95, 0.98, 0.99, 0.999)
    seeds: int = 10
    steps: int = 10_000
    shape: Shape = field(default_factory=Shape)
    sequences: int = 2
    lr: float = 1e-3


HOUR = Settings(betas=(0.95, 0.999), steps=3000)
FULL = Settings(steps=100_000, shape=Shape(width=128, layers=4, length=64), sequences=8)


def cases(settings: Settings) -> list[str]:
    """Every way at every β₂."""
    return [f"{way} {beta2}" for beta2 in settings.betas for way in WAYS]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train in one way."""
    way, beta2 = case.split()
    seeds, data = list(range(settings.seeds)), text.load(work.data)
    model = Replicas(seeds, settings.shape)
    sequences = text.Sequences(data, seeds, settings.sequences, settings.shape.length)

    def rate(step: int) -> float:
        return settings.lr * (1 - step / settings.steps)

    options = {"betas": (0.9, float(beta2)), "weight_decay": 0.1}
    training = Training(work, case, WAYS[way], model, sequences, rate, options)
    training.load(case)
    return {"points": training.run(settings.steps), "text": data.checksum}


def section(record: dict[str, Any]) -> Section:
    """The difference from FP32 of each way at each β₂."""
    settings = record["settings"]
    losses = {case: np.array(found["points"][-1]["loss"]) for case, found in record["cases"].items()}
    betas = [beta2 for beta2 in settings["betas"] if f"fp32 {beta2}" in losses]
    table = [["FP32", *(f"{losses[f'fp32 {beta2}'].mean():.4f}" for beta2 in betas)]]
    rows = []
    for way, mode in WAYS.items():
        if way == "fp32" or not all(f"{way} {beta2}" in losses for beta2 in betas):
            continue
        pairs = [paired(losses[f"{way} {beta2}"], losses[f"fp32 {beta2}"]) for beta2 in betas]
        table.append([mode.label, *(f"{found} {verdict(found)}" for found in pairs)])
        rows.append(all_equal(f"{mode.label}: ends where FP32 does", pairs, "values"))
    words = (
        f"{describe(settings)} It takes {settings['steps']:,} steps of AdamW with weight decay 0.1 and several values "
        f"of β₂, at a learning rate that falls from {settings['lr']} to zero."
    )
    heads = ["mode and states", *(f"β₂ = {beta2}" for beta2 in betas)]
    equal = sum(row.verdict == f"equal at {len(betas)} of {len(betas)} values" for row in rows)
    return Section(
        "Optimizer states",
        words,
        rows,
        [],
        question="Do optimizer states in BF16 or 8 bits cost accuracy?",
        answer=f"{equal} of {len(rows)} combinations of weights and states match FP32 at {' and '.join(heads[1:])}.",
        model=f"{Shape(**settings['shape']).parameters() / 1e6:.2f} million",
        table=f"FP32's loss, and differences from it, in nats/byte:\n\n{markdown_table(heads, table)}",
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("states", _SIZES, cases, run, section, reference=lambda case: "fp32 *")
