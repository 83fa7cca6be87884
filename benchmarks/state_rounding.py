"""How far BF16 training drifts from FP32 AdamW, by what is stored how; the table behind the defaults.

The same gradients go to torch's FP32 AdamW and to each setting: 2000 steps, lr 3e-4, decay 0.1, β2 0.999, gradients of unit
size and from step 500 on of a fifth of it. Reported of `weight + compensation` at the end: the relative norm of the
difference from FP32, and by how much the vector is too long or too short (the bias).

    python benchmarks/state_rounding.py [--elements 20000] [--seeds 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch

from hf_lowprec import AdamW
from hf_lowprec.optim.step import Layout

STEPS, DROP, LR, DECAY = 2000, 500, 3e-4, 0.1
FP32, BF16 = torch.float32, torch.bfloat16


class MixedRounding(AdamW):
    """AdamW that rounds only the states in `stochastic` stochastically."""

    stochastic: tuple[str, ...] = ()

    def _layout(self, *args: Any) -> Layout:
        layout = super()._layout(*args)
        states = (
            dataclasses.replace(s, stochastic=s.dtype == BF16 and s.name in self.stochastic) for s in layout.states
        )
        return dataclasses.replace(layout, states=tuple(states))


ALL = ("exp_avg", "exp_avg_sq", "compensation")
FP32_SECOND = {"state_dtype": {"exp_avg_sq": FP32}}
# Keyword arguments, and which states are rounded stochastically.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all states FP32": ({"state_dtype": FP32}, ALL),
    "second moment FP32": (FP32_SECOND, ("compensation",)),
    "second moment FP32, first moment stochastic": (FP32_SECOND, ("exp_avg", "compensation")),
    "all BF16, the default": ({}, ("exp_avg_sq", "compensation")),
    "all BF16, first moment stochastic too": ({}, ALL),
    "all BF16, second moment nearest": ({}, ("compensation",)),
    "all BF16, compensation nearest": ({}, ("exp_avg_sq",)),
    "all BF16, all nearest (textbook)": ({}, ()),
}


def drift(seed: int, elements: int) -> dict[str, tuple[float, float]]:
    """`(relative difference, relative excess length)` of the displacement's end point, by setting."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(elements, generator=generator).mul_(0.02).to(BF16)
    exact = torch.nn.Parameter(start.float())
    reference = torch.optim.AdamW([exact], lr=LR, weight_decay=DECAY)
    runs: dict[str, tuple[torch.nn.Parameter, AdamW]] = {}
    for name, (settings, stochastic) in SETTINGS.items():
        param = torch.nn.Parameter(start.clone())
        optimizer = MixedRounding([param], lr=LR, weight_decay=DECAY, seed=seed, **settings)
        optimizer.stochastic = stochastic
        runs[name] = (param, optimizer)
    for step in range(STEPS):
        grad = torch.randn(elements, generator=generator).mul_(1.0 if step < DROP else 0.2).to(BF16)
        exact.grad = grad.float()
        reference.step()
        for param, optimizer in runs.values():
            param.grad = grad
            optimizer.step()
    results = {}
    for name, (param, optimizer) in runs.items():
        value = param.detach().double() + optimizer.state[param]["compensation"].double()
        target = exact.detach().double()
        moved, wanted = value - start.double(), target - start.double()
        results[name] = (float((value - target).norm() / target.norm()), float(moved.norm() / wanted.norm() - 1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=20000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/state-rounding-{date.today()}.json"))
    options = parser.parse_args()
    runs = [drift(seed, options.elements) for seed in range(options.seeds)]
    table = {name: [statistics.mean(run[name][k] for run in runs) for k in (0, 1)] for name in SETTINGS}
    print("| what is stored how | difference from FP32 | too long by |\n|---|---:|---:|")
    for name, (difference, excess) in table.items():
        print(f"| {name} | {difference:.2e} | {excess:+.2%} |")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"options": vars(options), "mean": table, "runs": runs}, default=str) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
