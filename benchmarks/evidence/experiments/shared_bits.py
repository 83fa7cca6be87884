"""Do replicas stay equal under stochastic rounding? With shared random bits, bit for bit; with bits of their own, not.

Four replicas train on batches of their own and average their gradients, as data parallelism does. Either all round
with the same random bits, as this package does, or each with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

import hf_lowprec
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, describe, markdown_table
from benchmarks.evidence.statistics import exceeds, paired
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import validation
from benchmarks.evidence.training.replicas import Replicas, Shape

SHARED, OWN = "shared", "own"


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        seeds: how many runs of each kind.
        replicas: how many in a run.
        steps: of each run.
        records: steps after which replicas are compared.
        shape: of the model.
        sequences: per step and replica.
        lr: the constant rate.
    """

    seeds: int = 5
    replicas: int = 4
    steps: int = 10_000
    records: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    shape: Shape = field(default_factory=Shape)
    sequences: int = 1
    lr: float = 1e-3


HOUR = Settings(seeds=3, steps=3000, records=(100, 300, 1000, 3000))
FULL = Settings(steps=200_000, records=(1000, 10_000, 50_000, 200_000), shape=Shape(width=128, layers=4, length=64))


def cases(settings: Settings) -> list[str]:
    """Every seed with both kinds of random bits."""
    return [f"{bits} {seed}" for seed in range(settings.seeds) for bits in (SHARED, OWN)]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train one set of replicas; returns how far apart two of them are on average, and their mean loss."""
    bits, seed = case.split()
    models, optimizers = [], []
    for replica in range(settings.replicas):
        model = Replicas([int(seed)], settings.shape)
        hf_lowprec.cast_model(model)
        models.append(model)
        own = {"seed": replica} if bits == OWN else {}
        optimizers.append(hf_lowprec.AdamW(model.parameters(), lr=settings.lr, rounding="stochastic", **own))
    data = text.load(work.data)
    streams = [
        text.Sequences(data, [1000 * int(seed) + replica], settings.sequences, settings.shape.length)
        for replica in range(settings.replicas)
    ]
    points = []
    for step in range(settings.steps):
        for model, stream in zip(models, streams, strict=True):
            model.losses(stream.of_step(step)).sum().backward()
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([param.grad.float() for param in params]).mean(0).to(params[0].dtype)
            for param in params:
                param.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 in settings.records:
            weights = [parameters_to_vector(model.parameters()).detach().float() for model in models]
            apart = [float((a - b).norm() / a.norm()) for a, b in combinations(weights, 2)]
            losses = [float(validation(model, streams[0])) for model in models]
            points.append({"step": step + 1, "apart": float(np.mean(apart)), "loss": float(np.mean(losses))})
    work.progress(f"{case}: {points[-1]}")
    return {"points": points, "text": data.checksum}


def section(record: dict[str, Any]) -> Section:
    """The distance of replicas over steps, and what it costs."""
    settings, found = record["settings"], record["cases"]
    seeds = [k for k in range(settings["seeds"]) if all(f"{bits} {k}" in found for bits in (SHARED, OWN))]
    points = {bits: [found[f"{bits} {seed}"]["points"] for seed in seeds] for bits in (SHARED, OWN)}
    apart = {bits: np.array([[point["apart"] for point in each] for each in points[bits]]) for bits in points}
    losses = {bits: [each[-1]["loss"] for each in points[bits]] for bits in points}
    steps = [point["step"] for point in points[OWN][0]]
    cost = paired(losses[OWN], losses[SHARED])
    source = "Ozkara et al., shared randomness"
    rows = [
        Row(
            "replicas that share their random bits stay equal, in one process",
            f"{float(apart[SHARED].max()):g} apart",
            "holds" if not apart[SHARED].any() else "does not hold",
            source,
        ),
        Row(
            "replicas that draw their own bits drift apart",
            f"{apart[OWN][:, -1].mean():.1%} of the weights' norm after {steps[-1]:,} steps",
            "holds" if bool((np.diff(apart[OWN].mean(0)) > 0).all()) else "does not hold",
            source,
        ),
        Row(
            "drift costs loss, in nats/byte: mean of the replicas, less that with shared bits",
            str(cost),
            exceeds([cost]),
            source,
            "a larger final loss; divergence at large rates",
        ),
    ]
    words = (
        f"{describe(settings)} {settings['replicas']} replicas average their gradients; each has batches of its own. "
        f"They use AdamW with stochastic rounding at a constant learning rate of {settings['lr']}."
    )
    table = markdown_table(
        ["", *(f"{step:,}" for step in steps)],
        [[f"{bits} bits", *(f"{value:.2%}" for value in apart[bits].mean(0))] for bits in (SHARED, OWN)],
    )
    tables = [f"Mean distance of two replicas, relative to their norm, by step:\n\n{table}"]
    return Section(
        "Random bits of replicas",
        words,
        rows,
        tables,
        question="Must replicas share their random bits?",
        answer=f"Yes. If each draws its own bits, they drift {apart[OWN][:, -1].mean():.1%} apart, and the loss "
        f"changes by {cost}.",
        model=f"{Shape(**settings['shape']).parameters() / 1e6:.2f} million",
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("shared-bits", _SIZES, cases, run, section)
