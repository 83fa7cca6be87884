"""Other packages' AdamW and ours on the same text: loss, distance from FP32, bytes, time, and equal replicas.

Every optimizer of `benchmarks/peers/candidates.py` trains ten seeds of a small model at a constant rate, on equal data
and from equal weights, which BF16 represents. For BF16 weights, `cast_model` casts the model, with norms in FP32.
Packages that compile their step, torchao and HeavyBall, do so if there is a compiler. Packages that are not installed
are left out:

    pip install --no-deps torch-optimi torchao bitsandbytes heavyball opt-einsum
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

import hf_lowprec
from benchmarks.evidence.experiments import steps
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Section, markdown_table
from benchmarks.evidence.statistics import paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import validation
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape
from benchmarks.peers import memory, optimizers
from benchmarks.peers.candidates import BASELINE, CANDIDATES, FP32, Candidate, installed

FP32_CASE, AUTOCAST, PERTURBED, FASTER = "torch-adamw-fp32", "autocast", steps.PERTURBED, "fp32-faster"
STEP_TIME = "step-time"
BY_CASE = {re.sub("[^a-z0-9]+", "-", each.name.partition(" (")[0].lower()): each for each in CANDIDATES}


def _faster(params: list[Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1.1 * lr, fused=True, **options)


REFERENCES = {
    FP32_CASE: BY_CASE[FP32_CASE],
    AUTOCAST: replace(BY_CASE[FP32_CASE], name=f"{BASELINE} weights, autocast"),
    PERTURBED: replace(BY_CASE[FP32_CASE], name=f"{BASELINE}, first weights changed by 0.1%"),
    FASTER: replace(BY_CASE[FP32_CASE], name=f"{BASELINE}, learning rate 10% larger", build=_faster),
}
"""torch's AdamW with weights and states in FP32. Only the first one's step is timed."""
BY_CASE |= REFERENCES


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs and of the timing.

    Attributes:
        seeds: how many.
        steps: at a constant rate.
        shape: of the model. A seed's part of every matrix has a multiple of 256 elements, the largest block of 8-bit
            states, so that no block belongs to two seeds.
        sequences: per step and seed.
        lr: the rate.
        beta2: AdamW's second beta.
        weight_decay: AdamW's, of all parameters.
        replica_steps: after which two replicas are compared.
        repetitions: of the timing.
    """

    seeds: int = 10
    steps: int = 10_000
    shape: Shape = field(default_factory=Shape)
    sequences: int = 2
    lr: float = 3e-4
    beta2: float = 0.999
    weight_decay: float = 0.1
    replica_steps: int = 100
    repetitions: int = 30

    def adamw(self) -> dict[str, Any]:
        """The options that all packages have."""
        return {"lr": self.lr, "betas": (0.9, self.beta2), "eps": 1e-8, "weight_decay": self.weight_decay}


HOUR = Settings(steps=1500, repetitions=10)
FULL = Settings(seeds=20, steps=30_000)


def cases(settings: Settings) -> list[str]:
    """Every candidate whose package is installed, then the timing of all."""
    found = installed(BY_CASE.values())
    return [*(case for case, candidate in BY_CASE.items() if candidate in found), STEP_TIME]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Measure one candidate, or the step time of all of them."""
    compiles = shutil.which("g++") is not None
    with nullcontext() if compiles else optimizers.run_uncompiled():
        found = step_times(settings) if case == STEP_TIME else trained(case, settings, work)
    return {**found, "versions": optimizers.versions(), "compiles": compiles}


def trained(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train; returns losses of all seeds, bytes per parameter, and the share of weights that differ in two replicas."""
    candidate, seeds = BY_CASE[case], list(range(settings.seeds))
    precision = MODES["autocast" if case == AUTOCAST else "fp32"].precision
    torch.manual_seed(0)  # of random bits, where a package takes them from torch's generator
    model = Replicas(seeds, settings.shape)
    with torch.no_grad():
        for param in model.parameters():  # so that those that keep no further digits begin with equal weights
            param.copy_(param.bfloat16())
    if case == PERTURBED:
        steps.perturb(model, seeds)
    if candidate.dtype != FP32:
        hf_lowprec.cast_model(model, keep_low_bits=candidate.low_bits)
    params = list(model.parameters())
    optimizer = candidate.build(params, **settings.adamw())
    data = text.load(work.data)
    sequences = text.Sequences(data, seeds, settings.sequences, settings.shape.length)
    saved = work.load(case)
    first = restored(saved, model, optimizer) if saved else 0
    for step in range(first, settings.steps):
        optimizer.zero_grad()
        with precision():
            losses = model.losses(sequences.of_step(step))
        losses.sum().backward()
        optimizer.step()
        if work.is_due() and step + 1 < settings.steps:  # gradients are no part of a checkpoint, but counted at the end
            work.save(case, checkpoint(step + 1, model, optimizer))
    with precision():
        loss = validation(model, sequences)
    steps.snapshot(params, work.path(case, "npy"))
    work.progress(f"{case}: loss {float(loss.mean()):.4f} ± {float(loss.std()):.4f}")
    one, other = (replica(candidate, settings, rank) for rank in range(2))
    apart = float((one != other).float().mean())
    return {"loss": loss.tolist(), "bytes": memory.held(params, optimizer), "apart": apart, "text": data.checksum}


def checkpoint(step: int, model: Replicas, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint with the raw optimizer states: torch's `load_state_dict` would cast some to the weights' dtype."""
    return {
        "step": step,
        "model": model.state_dict(),
        "state": [optimizer.state[param] for param in model.parameters()],
        "groups": [{**group, "params": None} for group in optimizer.param_groups],
        "random": torch.get_rng_state(),
    }


def restored(saved: dict[str, Any], model: Replicas, optimizer: torch.optim.Optimizer) -> int:
    """Go on from a checkpoint; returns the number of steps that are done."""
    model.load_state_dict(saved["model"])
    optimizer.state.update(zip(model.parameters(), saved["state"], strict=True))
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values | {"params": group["params"]})
    torch.set_rng_state(saved["random"])
    return saved["step"]


def replica(candidate: Candidate, settings: Settings, rank: int) -> Tensor:
    """Weights after steps with gradients that all ranks share; only the seed of torch's generator is the rank's own."""
    generator = torch.Generator().manual_seed(0)
    shape = (settings.seeds, 256, settings.shape.width)
    param = Parameter(torch.randn(shape, generator=generator).mul_(0.02).to(candidate.dtype))
    torch.manual_seed(rank)
    optimizer = candidate.build([param], **settings.adamw())
    for _ in range(settings.replica_steps):
        param.grad = torch.randn(shape, generator=generator).to(candidate.dtype)
        optimizer.step()
    return param.detach()


def step_times(settings: Settings) -> dict[str, Any]:
    """Medians over repetitions in which all candidates take turns; nanoseconds per parameter."""
    runs, times = dict[str, torch.optim.Optimizer](), dict[str, list[float]]()
    for case in cases(settings)[:-1]:
        candidate = BY_CASE[case]
        if candidate.copied or case in REFERENCES.keys() - {FP32_CASE}:
            continue
        params = [Parameter(torch.randn(shape).mul_(0.02).to(candidate.dtype)) for shape in memory.SHAPES]
        for param in params:
            param.grad = torch.randn_like(param)
        runs[case], times[case] = candidate.build(params, **settings.adamw()), []
    for _ in range(settings.repetitions + 2):
        for case, optimizer in runs.items():
            start = time.perf_counter()
            optimizer.step()
            times[case].append(time.perf_counter() - start)
    count = sum(rows * columns for rows, columns in memory.SHAPES)
    return {"times": {case: 1e9 * statistics.median(found[2:]) / count for case, found in times.items()}}


def compare(settings: Settings, work: Workspace, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far the weights of each case are from FP32's, relative to their norm; of each seed."""
    distances = {}
    for case in results:
        paths = [work.path(name, "npy") for name in (case, FP32_CASE)]
        if case not in (FP32_CASE, STEP_TIME) and all(path.exists() for path in paths):
            distances[case] = steps.distance(*paths)
    return {"distance": distances}


def section(record: dict[str, Any]) -> Section:
    """All optimizers in the order of their losses; in each column, the best of those that are no reference is bold."""
    settings, results = record["settings"], {case: record["cases"][case] for case in BY_CASE if case in record["cases"]}
    times = record["cases"].get(STEP_TIME, {"times": {}})["times"]
    distance = record["compared"].get("distance", {})
    differences = {case: paired(found["loss"], results[FP32_CASE]["loss"]) for case, found in results.items()}
    order = sorted(results, key=lambda case: differences[case].mean)
    columns: list[tuple[str, dict[str, float], Callable[[float], str]]] = [
        ("distance from FP32's weights", {case: float(np.mean(x)) for case, x in distance.items()}, "{:.1%}".format),
        ("bytes per parameter", {case: found["bytes"] for case, found in results.items()}, "{:.2f}".format),
        ("step, ns per parameter", times, "{:.1f}".format),
    ]
    ranked = [case for case in order if case not in REFERENCES]
    verdicts = {case: verdict(differences[case]) for case in order}
    table = [[_name(case), f"{differences[case]} {verdicts[case]}"] for case in order]
    for _, values, cell in columns:
        best = cell(min((values[case] for case in ranked if case in values), default=math.nan))
        for case, line in zip(order, table, strict=True):
            shown = cell(values[case]) if case in values else "–"
            line.append(f"**{shown}**" if shown == best and case in ranked else shown)
    for case, line in zip(order, table, strict=True):
        line.append(_apart(results[case]["apart"]))
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for case in ranked:
        counts[BY_CASE[case].name.startswith("hf_lowprec")][verdicts[case].partition(",")[0]] += 1
    answer = "; ".join(
        f"{whose}: {', '.join(f'{count} {word}' for word, count in counts[own].items())}"
        for own, whose in ((True, "Compared with FP32, variants of hf_lowprec"), (False, "other packages"))
        if counts[own]
    )
    heads = ["optimizer", "loss − FP32's, nats/byte", *(head for head, _, _ in columns), "replicas stay identical"]
    return Section(
        "Other packages on text",
        _words(settings, results, record["cases"]),
        [],
        [_NOTES],
        question="Which optimizers end where FP32 does?",
        answer=f"{answer}.",
        model=f"{Shape(**settings['shape']).parameters() / 1e6:.2f} million",
        table=f"Sorted by loss:\n\n{markdown_table(heads, table)}",
    )


def _name(case: str) -> str:
    return BY_CASE[case].name + "; reimplemented" * BY_CASE[case].copied


_NOTES = """\
- **Bold**: the best in its column, without torch's rows with FP32 weights.
- **Loss**: below FP32's, it is a gain on this task and at this learning rate, and no sign of more precise arithmetic. \
The row "learning rate 10% larger" shows what larger steps do to FP32.
- **Distance from FP32's weights**: after the last step, relative to their norm. The row "changed by 0.1%" shows \
how far two FP32 runs diverge.
- **Bytes per parameter**: weights, gradients and states after the last step, counted on the tensors. Error feedback \
is stored in the momentum, so it takes none.
- **Step**: the optimizer's step alone on this CPU, the median of runs that take turns. –: not timed.
- **Reimplemented**: FlashOptim's package needs a GPU, as does Unsloth's `adamw_flash`, which is FlashOptim's with \
other options (as of Unsloth 2026.10.9). These rows are the published algorithm in torch operations.
- **Replicas**: two with equal weights and gradients, and torch seeded by the rank. Packages that take random bits \
from torch's generator keep replicas identical only if all ranks have the same seed and draw the same numbers."""


def _apart(share: float) -> str:
    return f"no: {share:.0%} of weights differ" if share else "yes"


def _words(settings: dict[str, Any], results: dict[str, Any], recorded: dict[str, Any]) -> str:
    versions = results[FP32_CASE]["versions"]
    for found in recorded.values():
        versions = versions | {name: each for name, each in found["versions"].items() if each != "not installed"}
    missing = [
        f"Not measured: {candidate.name}"
        + (f"; {candidate.package} is not installed." if versions.get(candidate.package) == "not installed" else ".")
        for case, candidate in BY_CASE.items()
        if case not in results
    ]
    packages = ", ".join(f"{name} {each}" for name, each in versions.items() if each != "not installed")
    words = (
        f"Every optimizer trains the same {settings['seeds']} models of {Shape(**settings['shape']).parameters():,} "
        f"parameters on the same bytes for {settings['steps']:,} steps at a constant learning rate of {settings['lr']} "
        f"with β₂ = {settings['beta2']} and weight decay {settings['weight_decay']}. FP32 ends at a validation loss of "
        f"{np.mean(results[FP32_CASE]['loss']):.4f} nats per byte. "
        f"torchao and HeavyBall {'compile their step' if results[FP32_CASE]['compiles'] else 'run uncompiled'}. "
        f"Versions: {packages}."
    )
    return " ".join([words, *missing])


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment(
    "peers",
    _SIZES,
    cases,
    run,
    section,
    reference=lambda case: FP32_CASE,
    alone=STEP_TIME,
    compare=compare,
)
