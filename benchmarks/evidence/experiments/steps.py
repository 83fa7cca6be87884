"""Does the distance from FP32 grow with the number of steps? And what does a cooldown leave of it?

Ten seeds of a small model train for many steps at a constant rate. Then the rate falls to zero over a tenth as many
steps, in the same mode and, for stochastic rounding, also in split, which takes over its states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, describe, markdown_table
from benchmarks.evidence.statistics import PRIMARY, Paired, growth, paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape

PERTURBED = "fp32-perturbed"
"""FP32 from first weights that each differ by a thousandth: how far two runs part without any rounding to 16 bits."""
SCALE = 1e-3
COOLDOWN = "cooldown"


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        modes: names in `MODES`, and `PERTURBED`.
        seeds: how many.
        steps: at a constant rate.
        records: steps after which loss and weights are recorded.
        shape: of the model.
        sequences: per step and seed.
        lr: the rate.
        beta2: AdamW's second beta.
        weight_decay: AdamW's, of all parameters.
    """

    modes: tuple[str, ...] = (
        *("fp32", PERTURBED, "feedback", "sr", "split", "kahan", "nearest"),
        *("feedback-int8", "factored-int8", "sr-int8", "split-int8", "autocast"),
    )
    seeds: int = 10
    steps: int = 100_000
    records: tuple[int, ...] = (1000, 3750, 7500, 15_000, 22_500, 30_000, 45_000, 60_000, 80_000, 100_000)
    shape: Shape = field(default_factory=Shape)
    sequences: int = 2
    lr: float = 3e-4
    beta2: float = 0.999
    weight_decay: float = 0.1


HOUR = Settings(steps=10_000, records=(1000, 3750, 7500, 10_000))
FULL = Settings(
    steps=1_000_000,
    records=(1000, 3750, 7500, 15_000, 30_000, 60_000, 100_000, 200_000, 400_000, 700_000, 1_000_000),
    shape=Shape(width=96, layers=4, length=64),
    sequences=8,
)


def cases(settings: Settings) -> list[str]:
    """Every mode at a constant rate, then the cooldowns."""
    cooldowns = [f"{mode}-{COOLDOWN}" for mode in settings.modes if mode != "autocast"]
    return [*settings.modes, *cooldowns, *IN_SPLIT]


def needs(case: str) -> list[str]:
    """A cooldown begins where its mode has ended."""
    base, _, _ = case.partition(f"-{COOLDOWN}")
    return [] if base == case else [base]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train one case, and keep its weights on the way."""
    base, cooldown, rest = case.partition(f"-{COOLDOWN}")
    last, length = settings.steps, settings.steps // 10
    data = text.load(work.data)
    training = of_mode(
        "split" if rest else base,
        settings,
        work,
        case,
        text.Sequences(data, list(range(settings.seeds)), settings.sequences, settings.shape.length),
        rate=lambda step: settings.lr * (1 - (step - last) / length if cooldown else 1),
    )
    if not training.load(case) and cooldown:
        training.load(base)
        training.points = []

    def observe() -> None:
        snapshot(training.model.parameters(), work.path(f"{case}-{training.step}", "npy"))

    points = training.run(last + length if cooldown else last, settings.records, observe)
    return {"points": points, "text": data.checksum}


def of_mode(name: str, settings: Settings, work: Workspace, case: str, *data: Any, **options: Any) -> Training:
    """The training of a mode from its first weights."""
    seeds = list(range(settings.seeds))
    model = Replicas(seeds, settings.shape)
    if name == PERTURBED:
        perturb(model, seeds)
    mode = MODES["fp32" if name == PERTURBED else name]
    adamw = {"betas": (0.9, settings.beta2), "weight_decay": settings.weight_decay}
    return Training(work, case, mode, model, *data, **options, options=adamw)


def perturb(model: Replicas, seeds: list[int]) -> None:
    """Change the weights of every replica, each by its own seed."""
    for k, seed in enumerate(seeds):
        change_slightly((param[k] for param in model.parameters()), 1_000_000 + seed)


@torch.no_grad()
def change_slightly(weights: Iterable[Tensor], seed: int) -> None:
    """Change every weight by a thousandth of itself, times a standard normal number."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.mul_(1 + SCALE * torch.randn(weight.shape, generator=generator))


def snapshot(params: Iterable[Tensor], path: Path) -> None:
    """Save the weights, to compare them with those of other cases."""
    weights = torch.cat([param.detach().float().flatten(1) for param in params], dim=1)
    np.save(path, weights.numpy())


def distance(path: Path, reference: Path) -> list[float]:
    """How far the weights of two snapshots are apart, relative to the norm of the second; of each seed."""
    weights, exact = map(np.load, (path, reference))
    return (np.linalg.norm(weights - exact, axis=1) / np.linalg.norm(exact, axis=1)).tolist()


def compare(settings: Settings, work: Workspace, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far the weights of each case are from FP32's, relative to their norm; of each seed at each recorded step."""
    distances: dict[str, dict[str, list[float]]] = {}
    for case, result in results.items():
        reference = "fp32" if COOLDOWN not in case else f"fp32-{COOLDOWN}"
        for step in (point["step"] for point in result["points"]):
            paths = [work.path(f"{name}-{step}", "npy") for name in (case, reference)]
            if case != reference and all(path.exists() for path in paths):
                distances.setdefault(case, {})[str(step)] = distance(*paths)
    return {"distance": distances}


LABELS = {
    "feedback": "stochastic",
    "sr": "stochastic without feedback",
    "split": "split",
    "kahan": "Kahan",
    "nearest": "rounded to nearest, including norm layers",
    "feedback-int8": "stochastic, 8-bit states",
    "factored-int8": "stochastic, factored second moment, 8-bit momentum",
    "sr-int8": "stochastic without feedback, 8-bit states",
    "split-int8": "split, 8-bit states",
    "autocast": "FP32 weights, autocast",
    PERTURBED: "FP32, first weights changed by 0.1%",
}
IN_SPLIT = {f"{mode}-{COOLDOWN}-in-split": mode for mode in ("feedback", "sr")}
"""Cooldowns in split of other modes, which the cases before them end in."""
SMALL = 0.002
"""Nats per byte. Error feedback is to end within it of FP32, and not to grow by more for each tenfold: a quarter of
what stochastic rounding without it loses after 100,000 steps."""
LATE = 0.2
"""Losses are averaged from this share of the steps on, which makes intervals three times as narrow."""


def section(record: dict[str, Any]) -> Section:
    """Whether modes end where FP32 does, whether differences grow, and what the cooldown leaves of them."""
    results, settings = record["cases"], record["settings"]
    losses = {case: np.array([point["loss"] for point in found["points"]]) for case, found in results.items()}
    steps = [point["step"] for point in results["fp32"]["points"]]
    first = next(k for k, step in enumerate(steps) if step >= LATE * steps[-1])
    late = {case: found[first:] for case, found in losses.items() if found.shape == losses["fp32"].shape}
    # What a tenfold number of steps gains, by which differences become steps.
    gain = -float(np.polyfit(np.log10(steps[first:]), late["fp32"].mean(1), 1)[0])
    modes = {mode: words for mode, words in LABELS.items() if mode in late}
    apart = record["compared"].get("distance", {})

    def difference(mode: str, claims: int = 1) -> Paired:
        return paired(late[mode].mean(0), late["fp32"].mean(0), claims)

    def cooled(case: str) -> str:
        return str(paired(losses[case][-1], losses[f"fp32-{COOLDOWN}"][-1])) if case in losses else "–"

    table = []
    for mode, words in modes.items():
        found = difference(mode)
        distance = apart.get(mode, {}).get(str(steps[-1]))
        table.append([
            words,
            f"{found} {verdict(found)}",
            f"{10 ** (found.mean / gain) - 1:+.1%}" if found.mean < gain else "> 900%",
            str(growth(steps[first:], (late[mode] - late["fp32"]).T)),
            cooled(f"{mode}-{COOLDOWN}"),
            "–" if distance is None else f"{np.mean(distance):.0%}",
        ])  # fmt: skip
    heads = (
        "mode; losses in nats/byte", f"loss − FP32's, mean from step {steps[first]:,}", "extra steps to catch up",
        "change per 10 × steps", "loss − FP32's after the cooldown", "distance from FP32's weights",
    )  # fmt: skip
    rows, primary = list[Row](), list[Row]()
    claims = {"split": "split matches FP32", "feedback": "stochastic matches FP32"}
    claims["nearest"] = "rounding to nearest does not match FP32"
    for mode in [mode for mode in claims if mode in modes]:
        found = difference(mode, PRIMARY)
        primary.append(Row(f"{claims[mode]} over {steps[-1]:,} steps", str(found), verdict(found)))
    if "feedback" in modes:
        found = difference("feedback")
        rows.append(Row(f"stochastic matches FP32 within {SMALL}", str(found), verdict(found, SMALL)))
    for case, mode in IN_SPLIT.items():
        if case in losses:
            found = paired(losses[f"{mode}-{COOLDOWN}"][-1], losses[case][-1])
            claim = f"{modes[mode]}: switching to split for the cooldown lowers the loss"
            rows.append(Row(claim, f"by {found}", "yes" if found.mean > found.half else "undecided"))
    end = f"{losses['fp32'][-1].mean():.4f} after the constant rate"
    if f"fp32-{COOLDOWN}" in losses:
        end += f" and at {losses[f'fp32-{COOLDOWN}'][-1].mean():.4f} after the cooldown"
    words = (
        f"{describe(settings)} It uses AdamW with β₂ = {settings['beta2']} and weight decay "
        f"{settings['weight_decay']}, at a constant learning rate of {settings['lr']}. In the cooldown, the learning "
        f"rate then falls linearly to zero over a tenth as many steps. FP32 ends at {end}. Losses are averaged over "
        f"the records from step {steps[first]:,}. From there, 10 × more steps lower FP32's loss by {gain:.2f}; "
        '"extra steps" converts a difference accordingly. The distance from FP32\'s weights is measured after the last '
        "step, relative to their norm. A dash means not measured. Without feedback, the loss difference of stochastic "
        "rounding grows with the steps, so shorter runs may not show it."
    )
    means = [
        [each, *(f"{value:+.4f}" for value in (losses[mode] - losses["fp32"]).mean(1))] for mode, each in modes.items()
    ]
    by_step = markdown_table(["", *(f"{step:,}" for step in steps)], means)
    ends = {mode: difference(mode) for mode in ("split", "feedback", "sr", "nearest") if mode in modes}
    answer = f"From step {steps[first]:,} to {steps[-1]:,}, the mean difference from FP32's loss is, in nats/byte: "
    answer += "; ".join(f"{modes[mode]} {found}" for mode, found in ends.items())
    return Section(
        "Steps",
        words,
        rows,
        [f"Mean difference of the loss, by step:\n\n{by_step}"],
        question="Does training drift away from FP32 over many steps?",
        answer=f"{answer}.",
        model=f"{Shape(**settings['shape']).parameters() / 1e6:.2f} million",
        figure=("evidence-steps", "Difference of the validation loss from FP32's over steps, by mode"),
        table=markdown_table(heads, table),
        primary=tuple(primary),
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment(
    "steps", _SIZES, cases, run, section, reference=lambda case: "fp32*", needs=needs, compare=compare
)
