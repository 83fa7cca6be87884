"""Split weights, Kahan summation and stochastic rounding: accuracy against FP32 AdamW, and time of a step on a CPU.

1. The same gradients go to torch's FP32 AdamW and to each setting, from FP32 weights of which the low bits are kept:
   unit noise around a mean that each element keeps (standard deviation 0.3), a fifth of both after a quarter of the
   steps. Reported is the norm of the difference between the displacement of the FP32 estimate (`fp32_state_dict`) and
   FP32's, relative to FP32's; and the same of the stored BF16 weights.
2. The share of FP32's displacement that the stored weights show after the first steps, from low bits, a dither or zero.
3. The median time of a step of one large tensor, divided by that of torch's fused FP32 AdamW in the same round.

    python benchmarks/split_weights.py [--elements 20000] [--steps 2000] [--seeds 3] [--timed 16777216] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lowprec import AdamW, cast_model, fp32_state_dict

RATES = (1e-6, 2e-5, 3e-4)
MODES = ("kahan", "split", "stochastic")
STATES: dict[str, dict[str, Any]] = {"BF16 states": {}, "FP32 states": {"state_dtype": torch.float32}}
FIRST_STEPS = (1, 3, 10, 30, 100)
FIRST_RATE = 2e-6


def from_fp32(exact: torch.Tensor, keep_low_bits: bool, **options: Any) -> tuple[nn.ParameterList, AdamW]:
    """A cast model of one tensor, and its optimizer."""
    params = nn.ParameterList([exact.clone()])
    cast_model(params, keep_low_bits=keep_low_bits)
    return params, AdamW(params, weight_decay=0.1, **options)


def drift(lr: float, elements: int, steps: int, seed: int) -> dict[str, tuple[float, float]]:
    """The relative difference of the displacement from FP32's, of the FP32 estimate and of the stored weights."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(elements, generator=generator).mul_(0.02)
    centre = torch.randn(elements, generator=generator).mul_(0.3)
    reference = nn.Parameter(exact.clone())
    in_fp32 = torch.optim.AdamW([reference], lr=lr, weight_decay=0.1)
    runs = {
        f"{mode}, {name}": from_fp32(exact, mode != "stochastic", lr=lr, rounding=mode, seed=seed, **states)
        for mode in MODES
        for name, states in STATES.items()
    }
    for step in range(steps):
        noise = torch.randn(elements, generator=generator)
        grad = (noise + centre).mul_(1.0 if step < steps // 4 else 0.2).to(torch.bfloat16)
        reference.grad = grad.float()
        in_fp32.step()
        for params, optimizer in runs.values():
            params[0].grad = grad
            optimizer.step()
    wanted = reference.detach().double() - exact.double()
    found = {}
    for name, (params, optimizer) in runs.items():
        values = (fp32_state_dict(params, optimizer)["0"], params[0].detach())
        distances = [float((value.double() - exact.double() - wanted).norm() / wanted.norm()) for value in values]
        found[name] = (distances[0], distances[1])
    return found


def first_steps(elements: int) -> dict[str, dict[int, float]]:
    """The share of FP32's displacement that the stored weights show, by mode and beginning."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(elements, generator=generator).mul_(0.02)
    mean = torch.randn(elements, generator=generator)
    reference = nn.Parameter(exact.clone())
    in_fp32 = torch.optim.AdamW([reference], lr=FIRST_RATE, weight_decay=0.1)
    runs = {
        f"{mode}, {kind}": from_fp32(exact, kind == "low_bits", lr=FIRST_RATE, rounding=mode, initial_compensation=kind)
        for mode in MODES[:-1]
        for kind in ("low_bits", "dither", "zero")
    }
    starts = {name: params[0].detach().double() for name, (params, _) in runs.items()}
    found: dict[str, dict[int, float]] = {name: {} for name in runs}
    for step in range(1, max(FIRST_STEPS) + 1):
        grad = (mean + torch.randn(elements, generator=generator)).to(torch.bfloat16)
        reference.grad = grad.float()
        in_fp32.step()
        for name, (params, optimizer) in runs.items():
            params[0].grad = grad
            optimizer.step()
            if step in FIRST_STEPS:
                move = reference.detach().double() - exact.double()
                found[name][step] = float((params[0].detach().double() - starts[name]) @ move / (move @ move))
    return found


def step_times(elements: int, rounds: int) -> dict[str, list[float]]:
    """Times of a step of a tensor with random values, divided by those of torch's fused FP32 AdamW, by round."""
    torch.set_num_threads(1)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    values = torch.randn(elements).mul_(0.02)
    exact = nn.Parameter(values.clone())
    exact.grad = torch.randn(elements)
    optimizers["FP32"] = torch.optim.AdamW([exact], fused=True)
    for mode in MODES:
        for name, states in STATES.items():
            params = [nn.Parameter(values.to(torch.bfloat16))]
            params[0].grad = exact.grad.to(torch.bfloat16)
            optimizers[f"{mode}, {name}"] = AdamW(params, rounding=mode, **states)
    for optimizer in optimizers.values():
        for _ in range(2):
            optimizer.step()
    ratios: dict[str, list[float]] = {name: [] for name in optimizers if name != "FP32"}
    for _ in range(rounds):
        seconds = {}
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            seconds[name] = time.perf_counter() - began
        for name, found in ratios.items():
            found.append(seconds[name] / seconds["FP32"])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=20000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/split-weights-{date.today()}.json"))
    options = parser.parse_args()

    runs = {lr: [drift(lr, options.elements, options.steps, seed) for seed in range(options.seeds)] for lr in RATES}
    print(f"| difference from FP32 | {' | '.join(f'lr {lr:g}: estimate | stored' for lr in RATES)} |")
    print(f"| --- |{' ---: | ---: |' * len(RATES)}")
    for name in runs[RATES[0]][0]:
        cells = [f"{statistics.mean(run[name][k] for run in runs[lr]):.2e}" for lr in RATES for k in (0, 1)]
        print(f"| {name} | {' | '.join(cells)} |")

    shares = first_steps(10 * options.elements)
    print(f"\n| share shown at lr {FIRST_RATE:g} after steps | {' | '.join(map(str, FIRST_STEPS))} |")
    print(f"| --- |{' ---: |' * len(FIRST_STEPS)}")
    for name, by_step in shares.items():
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in by_step.values())} |")

    ratios = step_times(options.timed, options.rounds)
    print("\n| time of a step | of FP32's |\n| --- | ---: |")
    for name, found in ratios.items():
        print(f"| {name} | {statistics.median(found):.3f} |")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = {"options": vars(options), "drift": runs, "first steps": shares, "times": ratios}
    options.output.write_text(json.dumps(results, default=str) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
