"""Training on a CPU: time, tokens per second and memory in FP32, with autocast, in stock BF16 and with this package.

Every way trains the same Llama on the same batch. All models are in one process and take steps in turn, in an order
that changes, so that all are equally affected by what else the machine does. Memory is measured in a process for each.

    python benchmarks/cpu_training.py [--millions 35 100] [--sequences 2] [--length 256] [--threads 2] [--rounds 9]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from recorded_run import recorded_run
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec

VOCABULARY = 16_384
SHAPES = {35: (512, 8), 100: (768, 12)}
"""Hidden size and layers by millions of parameters."""
STOCK = ("FP32", "autocast", "stock BF16")
WAYS = (*STOCK, "kahan", "split", "stochastic")
PHASES = ("forward", "backward", "step")


def training(way: str, options: argparse.Namespace, millions: int) -> Callable[[], Iterator[None]]:
    """Build a model and its optimizer; returns a function that yields after each of the `PHASES` of a step."""
    hidden, layers = SHAPES[millions]
    heads = hidden // 64
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer: torch.optim.Optimizer
    if way in STOCK:
        model.to(torch.bfloat16 if way == "stock BF16" else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        hf_lowprec.cast_model(model, keep_low_bits=way != "stochastic")
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-4, rounding=way)
    tokens = torch.randint(0, VOCABULARY, (options.sequences, options.length))

    def step() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        yield
        loss.backward()
        yield
        optimizer.step()
        optimizer.zero_grad()
        yield

    return step


def timed(step: Callable[[], Iterator[None]]) -> list[float]:
    """Seconds of each phase of a step."""
    times = [time.perf_counter()]
    for _ in step():
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def times(options: argparse.Namespace, millions: int) -> dict[str, Any]:
    """Medians of seconds by way and phase, and of the ratios of whole steps to autocast's in the same round."""
    steps = {way: training(way, options, millions) for way in WAYS}
    for step in steps.values():
        timed(step)
    rounds = []
    for _ in range(options.rounds):
        order = random.sample(WAYS, len(WAYS))
        rounds.append({way: timed(steps[way]) for way in order})
    found: dict[str, Any] = {}
    for way in WAYS:
        phases = {phase: statistics.median(each[way][k] for each in rounds) for k, phase in enumerate(PHASES)}
        ratios = sorted(sum(each[way]) / sum(each["autocast"]) for each in rounds)
        whole = statistics.median(sum(each[way]) for each in rounds)
        quartiles = statistics.quantiles(ratios, n=4)
        tokens = options.sequences * options.length / whole
        found[way] = {**phases, "whole": whole, "tokens_per_second": tokens, "ratio_to_autocast": quartiles}
    return found


def memory(options: argparse.Namespace, millions: int) -> dict[str, float]:
    """MiB that each way takes at most in three steps, beyond those of a process that has imported the same packages."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--memory-of", way, "--millions", str(millions)]
        for name in ("sequences", "length", "threads"):
            command += [f"--{name}", str(getattr(options, name))]
        found[way] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def resident(name: str) -> float:
    """MiB of this process on Linux: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        before = resident("VmRSS")
        step = training(options.memory_of, options, options.millions[0])
        for _ in range(3):
            timed(step)
        print(resident("VmHWM") - before)
        return
    with recorded_run(options) as result:
        result["cpu"], result["torch"] = torch.backends.cpu.get_cpu_capability(), torch.__version__
        for millions in options.millions:
            of_size = {"times": times(options, millions), "memory": memory(options, millions)}
            result[f"{millions} million parameters"] = of_size
            print(
                f"{millions} million parameters: milliseconds, tokens per second, whole steps to autocast's, peak MiB"
            )
            print(f"{'':12}", *(f"{phase:>9}" for phase in (*PHASES, "whole", "tokens/s", "ratio", "MiB")))
            for way, found in of_size["times"].items():
                milliseconds = [f"{1000 * found[phase]:9.1f}" for phase in (*PHASES, "whole")]
                rest = f"{found['tokens_per_second']:9.0f} {found['ratio_to_autocast'][1]:9.3f}"
                print(f"{way:12}", *milliseconds, rest, f"{of_size['memory'][way]:9.0f}")


if __name__ == "__main__":
    main()
