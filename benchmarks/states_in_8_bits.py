"""Measure the drift of Adam with states in 8 bits from Adam in FP32, for gradients that shrink in half of a block.

The same gradients go to torch's FP32 AdamW and to ours, 2000 steps without weight decay. Neighbouring elements have
gradients of different scales, by a log-normal factor of σ, and those of every second element shrink by `drop` after 500
steps. Weights are exact FP32 masters (`rounding="split"`), so that only the states differ. Reported of the displacement
after the last step:

- slope: its component along FP32's displacement, less one. Positive: weights move further than in FP32.
- error: the norm of its difference from FP32's, relative to the norm of FP32's.
- step ratio: the largest √(v of FP32 / v as stored) of an element in a step: how much too long one step can become.

    python benchmarks/states_in_8_bits.py [--elements 4096] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec import AdamW
from hf_lowprec.optim.state.states_in_8_bits import decoded_states
from hf_lowprec.rounding import join

STEPS, DROP_AFTER, LR, BETA1, EPS = 2000, 500, 1e-3, 0.9, 1e-20
FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8

STATES: dict[str, Any] = {
    "both moments in 8 bits": INT8,
    "second moment in 8 bits": {"exp_avg": FP32, "exp_avg_sq": INT8},
    "first moment in 8 bits": {"exp_avg": INT8, "exp_avg_sq": FP32},
    "both moments in BF16": BF16,
}
"""The states' dtypes, the others FP32."""
GRADIENTS = ("constant sign", "around a mean", "zero mean")
"""|N(0, 1)|; N(0, 1) plus a mean of its own for each element, N(0, 0.3²); N(0, 1)."""


class Case(NamedTuple):
    """A setting of the comparison: the kind of gradients, and their scales.

    Attributes:
        gradients: one of `GRADIENTS`.
        beta2: the decay rate of the second moment.
        drop: by how much the gradients of every second element shrink.
        sigma: standard deviation of the logarithm of the elements' scales.
    """

    gradients: str
    beta2: float
    drop: float
    sigma: float


CASES = [Case(*values) for values in product(GRADIENTS, (0.95, 0.99, 0.999), (5.0, 100.0), (0.0, 1.0, 2.0))]


@dataclass(frozen=True)
class Drift:
    """A displacement compared with FP32's; see the top of this file."""

    slope: float
    error: float
    step_ratio: float

    def rounded(self) -> dict[str, float]:
        """For the recorded file."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


class Training:
    """Weights that start at zero and are trained by our AdamW, a tensor for each case.

    Args:
        cases: what is trained.
        shape: the shape of each tensor.
        state_dtype: the argument of AdamW.
        seed: its seed.
    """

    def __init__(self, cases: Sequence[Case], shape: tuple[int, int], state_dtype: Any, seed: int) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(shape, dtype=BF16)) for _ in cases]
        groups = [
            {"params": [param], "betas": (BETA1, case.beta2)} for param, case in zip(self.params, cases, strict=True)
        ]
        self.optimizer = AdamW(
            groups,
            lr=LR,
            eps=EPS,
            weight_decay=0.0,
            rounding="split",
            initial_compensation="zero",
            state_dtype=state_dtype,
            seed=seed,
        )

    def step(self, grads: Tensor) -> None:
        """Take a step with gradients of shape (cases, *shape)."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.step()

    def _states(self, name: str) -> Tensor:
        return torch.stack([self.optimizer.state[param][name] for param in self.params])

    def second_moments(self) -> Tensor:
        """The second moments as stored; FP32 of shape (cases, *shape)."""
        states = (self.optimizer.state[param] for param in self.params)
        return torch.stack([decoded_states(state)["exp_avg_sq"].float() for state in states])

    def displacements(self) -> Tensor:
        """The masters; FP64 of shape (cases, elements)."""
        weights = torch.stack([param.detach() for param in self.params])
        return join(weights.float(), self._states("remainder").int()).double().flatten(1)


def gradients(cases: Sequence[Case], shape: tuple[int, int], seed: int) -> Iterator[Tensor]:
    """Yield the gradients of each of `STEPS` steps, BF16 of shape (cases, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    everything = (len(cases), *shape)
    scale = torch.exp(torch.randn(everything, generator=generator) * _column([case.sigma for case in cases]))
    mean = torch.randn(everything, generator=generator) * _column(
        [0.3 * (case.gradients == "around a mean") for case in cases]
    )
    is_constant = _column([case.gradients == "constant sign" for case in cases])
    after_drop = torch.ones(everything)
    after_drop[..., ::2] /= _column([case.drop for case in cases])
    for step in range(STEPS):
        noise = torch.randn(everything, generator=generator) + mean
        grads = torch.where(is_constant, noise.abs(), noise) * scale
        yield (grads * after_drop if step >= DROP_AFTER else grads).to(BF16)


def slope_and_error(moved: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Compare displacements of shape (cases, elements) with FP32's; see the top of this file."""
    slope = (moved * wanted).sum(1) / wanted.square().sum(1) - 1
    return slope, (moved - wanted).norm(dim=1) / wanted.norm(dim=1)


def measure(cases: Sequence[Case], states: Sequence[str], elements: int, seed: int) -> dict[str, list[Drift]]:
    """The drift of each case, by states.

    Args:
        cases: what is trained.
        states: keys of `STATES`.
        elements: how many elements are trained for each case; a multiple of 64.
        seed: of gradients and of rounding.
    """
    shape = (elements // 64, 64)
    exact = [torch.nn.Parameter(torch.zeros(shape)) for _ in cases]
    groups = [{"params": [param], "betas": (BETA1, case.beta2)} for param, case in zip(exact, cases, strict=True)]
    reference = torch.optim.AdamW(groups, lr=LR, eps=EPS, weight_decay=0.0, fused=True)
    runs = {name: Training(cases, shape, STATES[name], seed) for name in states}
    ratios = {name: torch.zeros(len(cases)) for name in states}
    for grads in gradients(cases, shape, seed):
        for param, grad in zip(exact, grads.float(), strict=True):
            param.grad = grad
        reference.step()
        right = torch.stack([reference.state[param]["exp_avg_sq"] for param in exact])
        for name, run in runs.items():
            run.step(grads)
            worst = (right / run.second_moments()).sqrt().flatten(1).amax(1)
            ratios[name] = torch.maximum(ratios[name], worst)

    wanted = torch.stack([param.detach() for param in exact]).double().flatten(1)
    drifts = {}
    for name, run in runs.items():
        slope, error = slope_and_error(run.displacements(), wanted)
        columns = torch.stack([slope, error, ratios[name].double()], dim=1)
        drifts[name] = [Drift(*values) for values in columns.tolist()]
    return drifts


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values)[:, None, None]


def markdown(runs: Sequence[dict[str, list[Drift]]]) -> str:
    """A table of the ranges over cases of the means over seeds, and of the largest step ratio of all."""
    lines = ["| states | gradients | slope | error | largest step ratio |", "| --- | --- | ---: | ---: | ---: |"]
    for name, gradients in product(runs[0], GRADIENTS):
        chosen = [k for k, case in enumerate(CASES) if case.gradients == gradients]
        slopes = [statistics.mean(run[name][k].slope for run in runs) for k in chosen]
        errors = [statistics.mean(run[name][k].error for run in runs) for k in chosen]
        ratio = max(run[name][k].step_ratio for run in runs for k in chosen)
        ranges = f"{min(slopes):+.2%} … {max(slopes):+.2%} | {min(errors):.1%} … {max(errors):.1%}"
        lines.append(f"| {name} | {gradients} | {ranges} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=4096, help="for each case and seed (default 4096)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/states-in-8-bits-{date.today()}.json"))
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        runs.append(measure(CASES, list(STATES), options.elements, seed))
        print(f"seed {seed} of {options.seeds}\n{markdown(runs)}\n", flush=True)
    recorded = [{name: [drift.rounded() for drift in drifts] for name, drifts in run.items()} for run in runs]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    cases = [case._asdict() for case in CASES]
    options.output.write_text(
        json.dumps({"options": vars(options), "cases": cases, "runs": recorded}, default=str) + "\n"
    )
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
