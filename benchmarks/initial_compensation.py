"""What the initial compensation changes in the first steps and at the end of a short run, and what it costs.

Kahan summation with a compensation that starts with the low bits of the FP32 weights, a dither or zero, and stochastic
rounding, compared with FP32 AdamW of the same seed:

1. the share of FP32's displacement that stored weights show after 1 to 100 steps;
2. validation losses after 1 to 100 steps of fine-tuning a byte-level Llama and a small encoder, and how far the weights
   end from FP32's;
3. memory until the first step has ended, and time of later steps.

A seed sets the new head's weights, the order of the batches and the random bits.

    python benchmarks/initial_compensation.py [--seeds 0,1,2] [--rates 1e-6,2e-5,1e-3]
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from encoder.pretraining import Pretraining
from first_steps.costs import memory_per_parameter, step_time_ratios
from first_steps.optimizers import FP32, OURS
from first_steps.stored_displacement import shares
from first_steps.tasks import Task, tasks
from first_steps.training import distances, train

from hf_lowprec.tools.demo.pretrained import quiet_libraries
from hf_lowprec.tools.demo.report import json_text

RESULTS = Path(__file__).parent / "results"
WORK = Path(__file__).parent / ".cache" / "initial_compensation"

SHARE_STEPS = (1, 3, 10, 30, 100)
SHARE_RATES = (1e-6, 2e-6, 2e-5, 1e-4, 1e-3)
LOSS_STEPS = (1, 2, 3, 5, 10, 20, 30, 40, 100)

Result = dict[str, Any]
"""One run: task, rate, seed, optimizer, losses by step, distances from FP32."""


def compare(task: Task, rate: float, seed: int, steps: int) -> list[Result]:
    """Train with every optimizer from the same weights on the same batches."""
    runs = {name: train(task, name, rate, seed, steps, [*LOSS_STEPS, steps]) for name in (FP32, *OURS)}
    return [
        {
            "task": task.name,
            "rate": rate,
            "seed": seed,
            "optimizer": name,
            "losses": run.losses,
            "distances": distances(run, runs[FP32]),
        }
        for name, run in runs.items()
    ]


def differences(results: Sequence[Result], task: str, rate: float, optimizer: str, step: int) -> list[float]:
    """Validation losses minus FP32's of the same seed."""

    def by_seed(name: str) -> dict[int, float]:
        found = [r for r in results if (r["task"], r["rate"], r["optimizer"]) == (task, rate, name)]
        return {r["seed"]: r["losses"][step] for r in found}

    exact = by_seed(FP32)
    return [loss - exact[seed] for seed, loss in by_seed(optimizer).items()]


def with_error(values: Sequence[float], form: str) -> str:
    """Mean ± standard error; for one value the value alone."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{mean(values):{form}} ± {stdev(values) / math.sqrt(len(values)):{form.removeprefix('+')}}"


def share_table(found: dict[float, dict[str, dict[int, float]]]) -> str:
    """Shares as Markdown."""
    lines = [f"| share shown after steps | {' | '.join(map(str, SHARE_STEPS))} |", f"| --- |{' ---: |' * 5}"]
    for rate, by_name in found.items():
        for name, by_step in by_name.items():
            cells = " | ".join(f"{by_step[step]:.3f}" for step in SHARE_STEPS)
            lines.append(f"| lr {rate:g}, {name} | {cells} |")
    return "\n".join(lines)


def loss_tables(results: Sequence[Result], steps: Sequence[int]) -> str:
    """FP32's losses, and the differences of the other optimizers in thousandths of a nat, as Markdown."""
    lines = []
    for task, rate in dict.fromkeys((r["task"], r["rate"]) for r in results):
        exact = [r["losses"] for r in results if (r["task"], r["rate"], r["optimizer"]) == (task, rate, FP32)]
        cells = " | ".join(f"{mean(losses[step] for losses in exact):.5f}" for step in steps)
        lines += [f"\n{task}, lr {rate:g}, {len(exact)} seeds; differences × 1000, ± standard error\n"]
        lines += [
            f"| step | {' | '.join(map(str, steps))} |",
            f"| --- |{' ---: |' * len(steps)}",
            f"| FP32 | {cells} |",
        ]
        for name in OURS:
            values = [[1e3 * d for d in differences(results, task, rate, name, step)] for step in steps]
            lines.append(f"| {name} | {' | '.join(with_error(value, '+.3f') for value in values)} |")
    return "\n".join(lines)


def distance_table(results: Sequence[Result]) -> str:
    """Distances from FP32 as Markdown."""
    lines = ["| task | lr | optimizer | FP32 estimate | stored weights |", "| --- | ---: | --- | ---: | ---: |"]
    for task, rate in dict.fromkeys((r["task"], r["rate"]) for r in results):
        for name in OURS:
            found = [r["distances"] for r in results if (r["task"], r["rate"], r["optimizer"]) == (task, rate, name)]
            cells = " | ".join(with_error([d[kind] for d in found], ".4f") for kind in ("estimate", "stored"))
            lines.append(f"| {task} | {rate:g} | {name} | {cells} |")
    return "\n".join(lines)


def cost_table(memory: dict[str, dict[str, float]], ratios: dict[str, float]) -> str:
    """Costs as Markdown."""
    lines = [
        "| initial compensation | peak until the first step has ended | after it | time of later steps |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, found in memory.items():
        cells = f"{found['peak']:.2f} bytes per parameter | {found['left']:.2f} | × {ratios.get(name, 1.0):.3f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def train_all(options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    """Run the second part, and print its tables; `write` is called after each seed with all results so far."""
    recipe = Pretraining(steps=options.encoder_steps, hidden=options.hidden)
    found = tasks(options.steps, options.llama_steps, recipe, options.validation, options.work)
    results: list[Result] = []
    for seed in map(int, options.seeds.split(",")):
        for task in found:
            for rate in map(float, options.rates.split(",")):
                results += compare(task, rate, seed, options.steps)
                print(f"seed {seed}, {task.name}, lr {rate:g}", file=sys.stderr, flush=True)
        write({"encoder": asdict(recipe), "runs": results})
    print(loss_tables(results, [step for step in (0, *LOSS_STEPS) if step <= options.steps]))
    print(f"\n{distance_table(results)}")


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Run, print the tables, write one file for each part; returns their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="shares,training,costs", help="which of them (default: all)")
    parser.add_argument("--elements", type=int, default=1_000_000, help="weights in the first part (default 1000000)")
    parser.add_argument("--seeds", default="0,1,2", help="of the second part (default 0,1,2)")
    parser.add_argument("--rates", default="1e-6,2e-5,1e-3", help="of the second part (default 1e-6,2e-5,1e-3)")
    parser.add_argument("--steps", type=int, default=100, help="of fine-tuning (default 100)")
    parser.add_argument("--validation", type=int, default=48, help="blocks or passages to validate on (default 48)")
    parser.add_argument("--encoder-steps", type=int, default=300, help="of the encoder's pre-training (default 300)")
    parser.add_argument("--hidden", type=int, default=Pretraining.hidden, help="width of the encoder")
    parser.add_argument("--llama-steps", type=int, default=300, help="of the Llama's pre-training (default 300)")
    parser.add_argument("--sizes", default="16,48", help="millions of parameters whose memory is measured")
    parser.add_argument("--rounds", type=int, default=100, help="steps to time (default 100)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--work", type=Path, default=WORK, help="where the pre-trained models are kept")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    for folder in (options.output_dir, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def write(part: str, numbers: dict[str, Any]) -> None:
        installed = ("hf-lowprec", "torch", "transformers", "datasets", "tokenizers")
        about = {
            "versions": {"python": platform.python_version(), **{name: version(name) for name in installed}},
            "device": f"cpu, {options.threads} threads",
            "options": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
        }
        path = options.output_dir / f"initial-compensation-{part}-{datetime.date.today().isoformat()}.json"
        path.write_text(json_text({**about, **numbers}), encoding="utf-8")
        if path not in written:
            written.append(path)

    parts = options.parts.split(",")
    if "shares" in parts:
        shown = {rate: shares(rate, SHARE_STEPS, options.elements, seed=0) for rate in SHARE_RATES}
        print(share_table(shown))
        write("shares", {"shares": shown})
    if "training" in parts:
        train_all(options, partial(write, "training"))
    if "costs" in parts:
        small, large = map(int, options.sizes.split(","))
        memory, ratios = memory_per_parameter((small, large)), step_time_ratios(options.rounds, 1 << 22)
        print(f"\n{cost_table(memory, ratios)}")
        write("costs", {"bytes_per_parameter": memory, "step_time_ratios": ratios})
    return written


if __name__ == "__main__":
    main()
