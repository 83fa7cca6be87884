"""Do replicas stay equal under stochastic rounding? With shared random bits, bit for bit; with bits of their own, not.

Four replicas train on batches of their own and average their gradients, as data parallelism does. Either all round
with the same random bits, as this package does, or each with its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

import hf_lowprec
from benchmarks.evidence import text
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.replicas import Replicas, Shape
from benchmarks.evidence.statistics import paired, verdict

SHARED, OWN = "shared", "own"
LIMIT = 0.01
"""Nats per byte."""


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
    """Train one set of replicas; returns how far apart they are, and the first one's loss."""
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
            weights = [parameters_to_vector(model.parameters()).detach().float() for model in models[:2]]
            apart = float((weights[0] - weights[1]).norm() / weights[0].norm())
            with torch.no_grad():
                loss = float(models[0].losses(streams[0].validation()))
            points.append({"step": step + 1, "apart": apart, "loss": loss})
    work.progress(f"{case}: {points[-1]}")
    return {"points": points, "text": data.checksum}


def section(record: dict[str, Any]) -> Section:
    """The distance of two replicas over steps, and what it costs."""
    settings = record["settings"]
    apart: dict[str, np.ndarray] = {}
    losses: dict[str, np.ndarray] = {}
    for bits in (SHARED, OWN):
        found = [case["points"] for name, case in sorted(record["cases"].items()) if name.startswith(f"{bits} ")]
        apart[bits] = np.array([[point["apart"] for point in points] for points in found])
        losses[bits] = np.array([points[-1]["loss"] for points in found])
        steps = [point["step"] for point in found[0]]
    cost = paired(losses[OWN], losses[SHARED])
    source = "Ozkara et al., as summaries have it"
    grows = bool((np.diff(apart[OWN].mean(0)) > 0).all())
    rows = [
        Row(
            "replicas that share their random bits stay equal",
            f"{float(apart[SHARED].max()):g} apart",
            "holds" if not apart[SHARED].any() else "does not hold",
            source,
        ),
        Row(
            "replicas that draw their own bits drift apart",
            f"{apart[OWN][:, -1].mean():.1%} of the weights' norm after {steps[-1]:,} steps",
            "holds" if grows else "does not hold",
            source,
        ),
        Row(
            "the drift costs no loss",
            f"{cost.mean:+.4f} ± {cost.half:.4f}; visible: {cost.visible:.4f}",
            verdict(cost, LIMIT),
        ),
    ]
    words = (
        f"{settings['replicas']} replicas of {Shape(**settings['shape']).parameters():,} parameters, "
        f"{settings['seeds']} seeds, AdamW at a constant {settings['lr']}. The limit of the loss is {LIMIT} nats."
    )
    table = markdown_table(
        ["", *(f"{step:,}" for step in steps)],
        [[f"{bits} bits", *(f"{value:.2%}" for value in apart[bits].mean(0))] for bits in (SHARED, OWN)],
    )
    return Section("Random bits of replicas", words, rows, [f"Distance of two replicas, of their norm:\n\n{table}"])


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("shared-bits", _SIZES, cases, lambda case: [], run, lambda *_: {}, section)
