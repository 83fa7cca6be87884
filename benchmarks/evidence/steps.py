"""Does the distance from FP32 grow with the number of steps? And what does a cooldown leave of it?

Ten seeds of a small model train for many steps at a constant rate. Then the rate falls to zero over a tenth as many
steps, in the same mode and, for stochastic rounding, also in split, which takes over its states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence import text
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.modes import MODES
from benchmarks.evidence.page import Row, Section, markdown_table
from benchmarks.evidence.replicas import BYTES, Replicas, Shape
from benchmarks.evidence.statistics import growth, paired, verdict
from benchmarks.evidence.training import Training
from hf_lowprec.optim.state.states_in_8_bits import decoded_states

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
        records: steps after which weights are looked at.
        shape: of the model.
        sequences: per step and seed.
        lr: the rate.
        beta2: AdamW's second beta.
        weight_decay: AdamW's, of all parameters.
    """

    modes: tuple[str, ...] = ("fp32", PERTURBED, "sr", "split", "kahan", "nearest", "sr-int8", "split-int8", "autocast")
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
    return [*settings.modes, *cooldowns, f"sr-{COOLDOWN}-in-split"]


def needs(case: str) -> list[str]:
    """A cooldown begins where its mode has ended."""
    base, _, _ = case.partition(f"-{COOLDOWN}")
    return [] if base == case else [base]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train one case, and look at its weights on the way."""
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
    classes = byte_classes(data.train)

    def observe() -> dict[str, Any]:
        snapshot(training.model, work, case, training.step)
        return looked_at(training.model, training.optimizer, classes)

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


def variance_of_rounding(weight: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """The variance with which `weight + update` is rounded stochastically to BF16, and the spacing around `weight`.

    Args:
        weight: FP32 tensor of numbers that BF16 represents.
        update: FP32 tensor, none of its elements negative, and so small that the spacing stays the same.
    """
    spacing = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 8)
    rest = torch.remainder(update, spacing)
    return rest * (spacing - rest), spacing


def perturb(model: Replicas, seeds: list[int]) -> None:
    """Change every weight by a thousandth of itself, times a standard normal number."""
    generators = [torch.Generator().manual_seed(1_000_000 + seed) for seed in seeds]
    with torch.no_grad():
        for param in model.parameters():
            for replica, generator in zip(param, generators, strict=True):
                replica.mul_(1 + SCALE * torch.randn(replica.shape, generator=generator))


def byte_classes(train: Tensor) -> dict[str, Tensor]:
    """The bytes of the vocabulary by how often they are in the text: a mask of each class."""
    share = torch.bincount(train.long(), minlength=BYTES) / len(train)
    limits = {"never": (-1, 0), "below 1e-5": (0, 1e-5), "below 1e-3": (1e-5, 1e-3), "above": (1e-3, 1)}
    return {name: (share > low) & (share <= high) for name, (low, high) in limits.items()}


@torch.no_grad()
def looked_at(model: Replicas, optimizer: torch.optim.Optimizer, classes: dict[str, Tensor]) -> dict[str, Any]:
    """Norms of the weights of each seed; and by class of bytes, of embeddings and their second moments' roots."""
    weights = [param.float().flatten(1) for param in model.parameters()]
    norms = torch.cat(weights, dim=1).norm(dim=1)
    rows = model.table.float().norm(dim=2)
    moments = decoded_states(optimizer.state[model.table])["exp_avg_sq"].float().sqrt().mean(dim=2)
    return {
        "norm": norms.tolist(),
        "embedding_norms": {name: rows[:, mask].mean(1).tolist() for name, mask in classes.items() if mask.any()},
        "second_moments": {name: moments[:, mask].mean(1).tolist() for name, mask in classes.items() if mask.any()},
    }


def snapshot(model: Replicas, work: Workspace, case: str, step: int) -> None:
    """Keep the weights, to compare them with those of other cases."""
    weights = torch.cat([param.detach().float().flatten(1) for param in model.parameters()], dim=1)
    np.save(work.path(f"{case}-{step}", "npy"), weights.numpy())


def compare(settings: Settings, work: Workspace, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far the weights of each case are from FP32's, relative to their norm; of each seed at each recorded step."""
    distances: dict[str, dict[str, list[float]]] = {}
    for case, result in results.items():
        reference = "fp32" if COOLDOWN not in case else f"fp32-{COOLDOWN}"
        for step in (point["step"] for point in result["points"]):
            paths = [work.path(f"{name}-{step}", "npy") for name in (case, reference)]
            if case != reference and all(path.exists() for path in paths):
                weights, exact = map(np.load, paths)
                distance = np.linalg.norm(weights - exact, axis=1) / np.linalg.norm(exact, axis=1)
                distances.setdefault(case, {})[str(step)] = distance.tolist()
    variances = {case: rounding_variance(case, settings, work) for case in ("sr", "sr-int8") if case in results}
    return {"distance": distances, "rounding": {case: found for case, found in variances.items() if found}}


def rounding_variance(case: str, settings: Settings, work: Workspace) -> dict[str, list[float]] | None:
    """What one stochastic rounding adds to the weights at the end of the constant rate, for each seed.

    An update u of a weight whose neighbours are s apart is rounded with a variance of |u|(s − |u|), for |u| < s.

    Returns:
        `per_step`: the root of the variance of all weights, of their norm. `random_walk`: the same after all steps, if
        nothing pulled weights back. `spacings`: the median of s/|u|. None if the checkpoint is gone.
    """
    training = of_mode(case, settings, work, case, None, rate=lambda step: settings.lr)
    if not training.load(case):
        return None
    variances, squares, ratios = [], [], []
    for param in training.model.parameters():
        if param.dtype != torch.bfloat16:
            continue
        state = decoded_states(training.optimizer.state[param])
        weight = param.detach().float()
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        update = settings.lr * (first / (second.sqrt() + 1e-8) + settings.weight_decay * weight).abs()
        variance, spacing = variance_of_rounding(weight, update)
        variances.append(variance.flatten(1).sum(1))
        squares.append(weight.square().flatten(1).sum(1))
        ratios.append((spacing / update.clamp_min(1e-12)).flatten(1).median(1).values)
    per_step = (sum(variances) / sum(squares)).sqrt()
    return {
        "per_step": per_step.tolist(),
        "random_walk": (per_step * settings.steps**0.5).tolist(),
        "spacings": torch.stack(ratios).median(0).values.tolist(),
    }


LIMIT = 0.01
"""Nats per byte, 1% of perplexity: differences below are called equal."""
_CLAIMS = {
    "sr": "stochastic rounding",
    "split": "split",
    "kahan": "Kahan summation",
    "nearest": "rounding to nearest",
    "sr-int8": "stochastic rounding with 8-bit states",
    "split-int8": "split with 8-bit states",
    "autocast": "autocast",
    PERTURBED: "FP32 from weights changed by a thousandth",
}


def section(record: dict[str, Any]) -> Section:
    """Whether modes end where FP32 does, whether differences grow, and what the cooldown leaves of them."""
    results, settings = record["cases"], record["settings"]
    losses = {case: np.array([point["loss"] for point in found["points"]]) for case, found in results.items()}
    steps = [point["step"] for point in results["fp32"]["points"]]
    rows, at_steps, scatter = [], list[list[str]](), list[list[str]]()
    for mode, words in _CLAIMS.items():
        if mode not in losses:
            continue
        differences = losses[mode] - losses["fp32"]
        rows.append(
            _row(f"{words}: ends where FP32 does after {steps[-1]:,} steps", losses[mode][-1], losses["fp32"][-1])
        )
        growing = growth(steps, differences.T)
        verdict_of_growth = "undecided" if abs(growing.mean) < growing.half else "yes" if growing.mean > 0 else "falls"
        measured = f"{growing.mean:+.4f} ± {growing.half:.4f} for each tenfold"
        rows.append(Row(f"{words}: the difference grows with steps", measured, verdict_of_growth))
        at_steps.append([words, *(f"{value:+.4f}" for value in differences.mean(1))])
        scatter.append([words, *(f"{value:.4f}" for value in differences.std(1, ddof=1))])
    for case, words in {**{f"{mode}-{COOLDOWN}": words for mode, words in _CLAIMS.items()}, _LAST: _IN_SPLIT}.items():
        if case in losses and f"fp32-{COOLDOWN}" in losses:
            rows.append(
                _row(f"{words}: ends where FP32 does after the cooldown", losses[case][-1], losses[_REFERENCE][-1])
            )
    heads = [f"{step:,}" for step in steps]
    text = (
        f"{Shape(**settings['shape']).parameters():,} parameters, bytes of Python's standard library, "
        f"{settings['seeds']} seeds, AdamW with β₂ = {settings['beta2']} and decay {settings['weight_decay']} at a "
        f"constant rate of {settings['lr']}, then a linear fall to zero over a tenth as many steps. Validation loss in "
        f"nats per byte; the limit is {LIMIT}. FP32 ends at {losses['fp32'][-1].mean():.4f}."
    )
    distances = [
        [_CLAIMS[case], *(f"{100 * np.mean(found[str(step)]):.1f}%" for step in steps)]
        for case, found in record["compared"].get("distance", {}).items()
        if case in _CLAIMS and all(str(step) in found for step in steps)
    ]
    ends = {case: found["points"][-1] for case, found in results.items()}
    looks = [
        [
            words,
            _relative(ends[case]["norm"], ends["fp32"]["norm"]),
            *(
                _relative(ends[case][kind][name], ends["fp32"][kind][name])
                for kind in ("embedding_norms", "second_moments")
                for name in ends["fp32"][kind]
            ),
        ]
        for case, words in _CLAIMS.items()
        if case in ends
    ]
    of_looks = ["", "norm", *(f"embeddings: {name}" for name in ends["fp32"]["embedding_norms"])]
    of_looks += [f"second moments: {name}" for name in ends["fp32"]["second_moments"]]
    walks = [
        [
            _CLAIMS[case],
            f"{np.mean(found['spacings']):.1f}",
            f"{np.mean(found['per_step']):.3%}",
            f"{np.mean(found['random_walk']):.1%}",
        ]
        for case, found in record["compared"].get("rounding", {}).items()
    ]
    of_walks = ["", "spacing, in updates", "of one step", "of all steps"]
    picture = (
        "Difference of the validation loss from FP32's over steps, for stochastic rounding, Kahan summation and split"
    )
    tables = [
        *(f"![{picture}](../images/evidence-steps{suffix})" for suffix in (".svg#only-light", "-dark.svg#only-dark")),
        f"Mean difference of the loss after so many steps:\n\n{markdown_table(['', *heads], at_steps)}",
        f"Its standard deviation over seeds:\n\n{markdown_table(['', *heads], scatter)}",
        f"Distance of the weights from FP32's, of their norm:\n\n{markdown_table(['', *heads], distances)}",
        "Norm of all weights, and, by the share of a byte in the text, norms of embeddings and roots of their second "
        f"moments; differences from FP32's after the last step:\n\n{markdown_table(of_looks, looks)}",
        "What stochastic rounding adds to the weights, of their norm, by the states after the last step: an update u "
        f"between numbers s apart adds a variance of u(s − u).\n\n{markdown_table(of_walks, walks)}",
    ]
    return Section("Steps", text, rows, tables)


_LAST, _REFERENCE = f"sr-{COOLDOWN}-in-split", f"fp32-{COOLDOWN}"
_IN_SPLIT = "stochastic rounding, with the cooldown in split"


def _relative(values: list[float], reference: list[float]) -> str:
    found = paired(np.array(values) / np.array(reference), [1.0] * len(values))
    return f"{found.mean:+.1%} ± {found.half:.1%}"


def _row(claim: str, values: np.ndarray, reference: np.ndarray) -> Row:
    found = paired(values, reference)
    measured = f"{found.mean:+.4f} ± {found.half:.4f}; visible: {found.visible:.4f}"
    return Row(claim, measured, verdict(found, LIMIT))


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("steps", _SIZES, cases, needs, run, compare, section)
