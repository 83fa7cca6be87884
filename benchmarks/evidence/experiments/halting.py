"""Where does SGD stop, and which rounding stops it? Zamirai et al., Theorems 1 and 2 and Figure 2.

Least squares with an exact solution w*, so that the gradients of all samples vanish there and SGD with exact weights
ends at w*. If updates are rounded to nearest, one below half the spacing of a weight changes nothing. Theorem 1 bounds
how near SGD then comes: with samples whose gradients are L-Lipschitz, a rate α and the machine's ε, no nearer than
ε(1 − αL)/(αL + ε) · min |w*|. By Theorem 2, rounding forward and backward alone sets no such bound. Figure 2 shows both
for labels with noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, markdown_table
from hf_lowprec.optim import SGD

MODES = {
    "fp32": "FP32",
    "updates": "FP32, updates rounded",
    "compute": "FP32, forward and backward rounded",
    "outputs": "FP32, forward and backward rounded, outputs before labels are subtracted",
    "nearest": "nearest",
    "stochastic": "stochastic",
    "kahan": "Kahan",
    "split": "split",
}
"""The paper's emulations, each of which rounds one thing to nearest; then this package, which rounds everything."""
NOISE = "noise"
EPSILON = 2.0**-8
"""Of BF16, with 8 bits of mantissa: half the spacing of the numbers just above 1."""
NEAR = 2.0
"""A distance or a loss that is less than so many times FP32's is called near to it."""
ORDERS = 100.0
"""So many times FP32's loss are orders of magnitude."""


@dataclass(frozen=True)
class Settings:
    """The least-squares problems and how long SGD runs on them.

    Attributes:
        problems: how many, with samples and solutions of their own.
        dimensions: of a solution, whose elements are uniform between 1 and 2 with random signs.
        samples: of each problem, normal and scaled to a length of 1, so that L = 1.
        steps: of SGD with one sample each.
        rates: α.
        noise: deviation of the labels in Figure 2, where solutions are uniform between 0 and 100 and samples normal.
        noise_rate: the rate there.
        records: steps after which the loss is taken there.
    """

    problems: int = 200
    dimensions: int = 10
    samples: int = 100
    steps: int = 30_000
    rates: tuple[float, ...] = (0.5, 0.1, 0.02)
    noise: float = 0.5
    noise_rate: float = 0.01
    records: tuple[int, ...] = (300, 1000, 10_000)


def cases(settings: Settings) -> list[str]:
    """Every mode at every rate, and with noise."""
    return [f"{mode}-{kind}" for mode in MODES for kind in (*settings.rates, NOISE)]


def gradients(mode: str, weights: torch.Tensor, samples: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of one sample of each problem, in the dtype of the weights; in BF16 modes every result is rounded to nearest."""
    outputs = (samples * weights.float()).sum(1)
    if mode == "outputs":
        outputs = _rounded(outputs)
    residuals = outputs - targets
    if mode not in ("fp32", "updates"):
        return _rounded(_rounded(residuals).unsqueeze(1) * samples).to(weights.dtype)
    return residuals.unsqueeze(1) * samples


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """The distances from the solutions after the last step, relative to the smallest weight; with noise, the losses."""
    mode, kind = case.split("-")
    generator = torch.Generator().manual_seed(0)
    shape = (settings.problems, settings.dimensions)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    uniform = torch.rand(shape, generator=generator)
    samples = torch.randn(settings.problems, settings.samples, settings.dimensions, generator=generator)
    if kind == NOISE:
        solution, steps, rate = 100 * uniform, settings.records[-1], settings.noise_rate
    else:
        solution, steps, rate = (1 + uniform) * signs, settings.steps, float(kind)
        samples /= samples.norm(dim=2, keepdim=True)
    targets = (samples @ solution.unsqueeze(2)).squeeze(2)
    if kind == NOISE:
        targets += settings.noise * torch.randn(targets.shape, generator=generator)
    ours = mode in ("nearest", "stochastic", "kahan", "split")
    weights = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16 if ours else torch.float32))
    optimizer = SGD([weights], lr=rate, rounding=mode if ours else "nearest")
    problems, losses = torch.arange(settings.problems), []
    for step in range(1, steps + 1):
        chosen = torch.randint(0, settings.samples, (settings.problems,), generator=generator)
        weights.grad = gradients(mode, weights.detach(), samples[problems, chosen], targets[problems, chosen])
        optimizer.step()
        if mode == "updates":
            weights.data = _rounded(weights.data)
        if kind == NOISE and step in settings.records:
            residuals = (samples @ weights.detach().float().unsqueeze(2)).squeeze(2) - targets
            losses.append(float(residuals.square().mean()) / 2)
    if kind == NOISE:
        work.progress(f"{case}: {losses[-1]:.3f}")
        return {"losses": losses}
    smallest = solution.abs().amin(dim=1)
    distances = (weights.detach().float() - solution).norm(dim=1) / smallest
    work.progress(f"{case}: {float(distances.median()):.2e}")
    found = {"distances": distances.tolist()}
    if mode == "fp32":
        found["rounded"] = ((_rounded(solution) - solution).norm(dim=1) / smallest).tolist()
    return found


def bound(rate: float) -> float:
    """Theorem 1 for L = 1, relative to the smallest weight of the solution."""
    return EPSILON * (1 - rate) / (rate + EPSILON)


def section(record: dict[str, Any]) -> Section:
    """Compare the final distances of each mode with the bound and with FP32's, and losses with FP32's."""
    settings, found = record["settings"], record["cases"]
    rates, count = settings["rates"], settings["problems"]
    medians = {c: float(np.median(each["distances"])) for c, each in found.items() if "distances" in each}
    losses = {c.removesuffix(f"-{NOISE}"): each["losses"] for c, each in found.items() if "losses" in each}
    rows = []
    for rate in [rate for rate in rates if f"updates-{rate}" in found]:
        kept = {
            label: sum(each >= bound(rate) for each in found[f"{mode}-{rate}"]["distances"])
            for mode, label in MODES.items()
            if mode not in ("compute", "outputs") and f"{mode}-{rate}" in found
        }
        rows.append(
            Row(
                f"updates rounded to nearest: SGD comes no nearer than {bound(rate):.4f}, at a rate of {rate}",
                "; ".join(f"{label}: {each}" for label, each in kept.items()) + f" of {count} problems",
                "holds" if kept[MODES["updates"]] == count else "does not hold",
                "Zamirai et al., Theorem 1",
            )
        )
    near = dict[str, str]()
    for mode in ("compute", "outputs"):
        pairs = [(f"{mode}-{rate}", f"fp32-{rate}") for rate in rates]
        if ratios := [medians[own] / medians[exact] for own, exact in pairs if {own, exact} <= medians.keys()]:
            near[mode] = "holds" if max(ratios) < NEAR else "does not hold"
            rows.append(
                Row(
                    f"{MODES[mode]}: SGD comes as near as FP32",
                    f"{min(ratios):,.2f} to {max(ratios):,.2f} times FP32's distance",
                    near[mode],
                    "Zamirai et al., Theorem 2" if mode == "compute" else "",
                )
            )
    compared = [
        mode for mode in ("updates", "compute", "stochastic", "kahan", "split") if {mode, "fp32"} <= losses.keys()
    ]
    for mode in compared:
        ratio, far = losses[mode][-1] / losses["fp32"][-1], mode == "updates"
        end = "orders of magnitude (100 times or more) above" if far else "near"
        rows.append(
            Row(
                f"labels with noise, {MODES[mode]}: ends {end} FP32's loss",
                f"{ratio:.2f} times",
                "yes" if (ratio >= ORDERS if far else ratio < NEAR) else "no",
                "Zamirai et al., Figure 2" if mode in ("updates", "compute") else "",
            )
        )
    open_ = ["–"] * len(settings["records"])
    table = [
        [
            label,
            *(f"{medians[case]:.1e}" if (case := f"{mode}-{rate}") in medians else "–" for rate in rates),
            *([f"{loss:.4g}" for loss in losses[mode]] if mode in losses else open_),
        ]
        for mode, label in MODES.items()
        if any(case.startswith(f"{mode}-") for case in found)
    ]
    rounded = [np.median(each["rounded"]) for each in found.values() if "rounded" in each][:1]
    table += [["the solution itself, rounded to BF16", *[f"{each:.1e}"] * len(rates), *open_] for each in rounded]
    text = (
        f"{count} least-squares problems in {settings['dimensions']} dimensions, {settings['steps']:,} steps of SGD "
        "with one sample each. Distances from the solution are relative to the solution's smallest weight. The bound "
        "is Theorem 1 with the rate, L = 1 and ε = 2⁻⁸. At a rate of 0.5, it is below the spacing of BF16 numbers, so "
        "every BF16 mode stays above it: that row says nothing of rounding to nearest in particular. Labels with noise "
        f"are those of Figure 2: solutions up to 100, noise of {settings['noise']}, a rate of "
        f"{settings['noise_rate']}. “FP32, …” rounds one thing, as the paper does; the modes below round everything, "
        "and SGD without momentum has no error feedback. BF16 weights above 64 are 0.5 apart, which costs loss. "
        f"“Near” is less than {NEAR:g} times FP32's, “orders of magnitude” {ORDERS:g} times or more."
    )
    heads = ["", *(f"α = {rate}" for rate in rates), *(f"loss, {step:,} steps" for step in settings["records"])]
    ends = f"Median distance after the last step at each rate, and loss with noise:\n\n{markdown_table(heads, table)}"
    held = [row.verdict == "holds" for row in rows if row.source.endswith("Theorem 1")]
    answer = f"Yes, no nearer than Theorem 1 of Zamirai et al. allows, at {sum(held)} of {len(held)} learning rates"
    if near.get("compute") == "holds":
        answer += ". Rounding only the forward and backward pass does not stop it"
        answer += ", unless outputs are rounded before labels are subtracted" * (near.get("outputs") != "holds")
    return Section(
        "Where SGD stops",
        text,
        rows,
        [ends],
        question="Does rounding to nearest stop SGD short of the solution?",
        answer=f"{answer}.",
        model=f"{settings['dimensions']} weights",
    )


EXPERIMENT = Experiment("halting", {"hour": Settings()}, cases, run, section)
