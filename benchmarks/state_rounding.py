"""How far BF16 training drifts from FP32 AdamW for each choice of storage and rounding; the table behind the defaults.

The same gradients go to torch's FP32 AdamW and to each setting: 2000 steps, lr 3e-4, decay 0.1, β2 0.999, noise of
unit size and from step 500 on of a fifth of it; once without a mean, once around a mean that each element keeps
(standard deviation 0.3 of the noise). Of the displacement of `weight + compensation` after the last step two
numbers are reported: the relative norm of its difference from FP32's, and how much too far it went in the direction of
FP32's (the bias).

    python benchmarks/state_rounding.py [--elements 20000] [--seeds 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_lowprec import AdamW
from hf_lowprec.optim.step import step_plan
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.step_plan import step_spec

STEPS, DROP, LR, DECAY = 2000, 500, 3e-4, 0.1
FP32, BF16 = torch.float32, torch.bfloat16


class MixedRounding(AdamW):
    """AdamW that rounds only the states in `stochastic` stochastically."""

    stochastic: tuple[str, ...] = ()


def _mixed_spec(optimizer: MixedRounding, *args: Any) -> KernelSpec:
    """The spec of a step whose states are rounded as `optimizer.stochastic` says: no user of the package needs that."""
    spec = step_spec(optimizer, *args)
    states = (
        dataclasses.replace(s, stochastic=s.dtype == BF16 and s.name in optimizer.stochastic) for s in spec.states
    )
    return dataclasses.replace(spec, states=tuple(states))


ALL = ("exp_avg", "exp_avg_sq", "compensation")
FP32_SECOND = {"state_dtype": {"exp_avg_sq": FP32}}
# Keyword arguments, and which states are rounded stochastically.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all states FP32": ({"state_dtype": FP32}, ALL),
    "second moment FP32": (FP32_SECOND, ALL),
    "second moment FP32, first moment nearest": (FP32_SECOND, ("compensation",)),
    "all BF16, the default": ({}, ALL),
    "all BF16, first moment nearest": ({}, ("exp_avg_sq", "compensation")),
    "all BF16, second moment nearest": ({}, ("exp_avg", "compensation")),
    "all BF16, compensation nearest": ({}, ("exp_avg", "exp_avg_sq")),
    "all BF16, all nearest (textbook)": ({}, ()),
}
MEANS = {"without a mean": 0.0, "around a mean": 0.3}


def gradients(seed: int, elements: int, mean: float) -> tuple[Tensor, Iterator[Tensor]]:
    """The first weights, and the gradients of each of `STEPS` steps; BF16."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(elements, generator=generator).mul_(0.02).to(BF16)
    centre = torch.randn(elements, generator=generator).mul_(mean)

    def grads() -> Iterator[Tensor]:
        for step in range(STEPS):
            noise = torch.randn(elements, generator=generator)
            yield (noise + centre).mul_(1.0 if step < DROP else 0.2).to(BF16)

    return start, grads()


@mock.patch.object(step_plan, "step_spec", _mixed_spec)
def drift(seed: int, elements: int, mean: float) -> dict[str, tuple[float, float]]:
    """`(relative difference, relative excess along FP32)` of the displacement, by setting."""
    start, grads = gradients(seed, elements, mean)
    exact = torch.nn.Parameter(start.float())
    reference = torch.optim.AdamW([exact], lr=LR, weight_decay=DECAY)
    runs: dict[str, tuple[torch.nn.Parameter, AdamW]] = {}
    for name, (settings, stochastic) in SETTINGS.items():
        param = torch.nn.Parameter(start.clone())
        optimizer = MixedRounding([param], lr=LR, weight_decay=DECAY, seed=seed, **settings)
        optimizer.stochastic = stochastic
        runs[name] = (param, optimizer)
    for grad in grads:
        exact.grad = grad.float()
        reference.step()
        for param, optimizer in runs.values():
            param.grad = grad
            optimizer.step()
    wanted = exact.detach().double() - start.double()
    results = {}
    for name, (param, optimizer) in runs.items():
        moved = param.detach().double() + optimizer.state[param]["compensation"].double() - start.double()
        excess = float(moved @ wanted / (wanted @ wanted)) - 1
        results[name] = (float((moved - wanted).norm() / wanted.norm()), excess)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=20000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/state-rounding-{date.today()}.json"))
    options = parser.parse_args()
    runs = {
        title: [drift(seed, options.elements, mean) for seed in range(options.seeds)] for title, mean in MEANS.items()
    }
    table = {
        name: [statistics.mean(run[name][k] for run in runs[title]) for title in MEANS for k in (0, 1)]
        for name in SETTINGS
    }
    print(f"| storage and rounding | {' | '.join(f'{title}: difference | too far by' for title in MEANS)} |")
    print("|---|---:|---:|---:|---:|")
    for name, (*values,) in table.items():
        print(f"| {name} | {values[0]:.2e} | {values[1]:+.2%} | {values[2]:.2e} | {values[3]:+.2%} |")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"options": vars(options), "mean": table, "runs": runs}, default=str) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
