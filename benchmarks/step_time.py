"""Time of one optimizer step on the CPU: ours in each mode, compared with torch's fused AdamW and optimi.

All candidates step the same shapes, interleaved in one process, so that changes in the machine's speed affect all of
them equally; medians are compared. How fast a process is also depends on where its memory lies, and not to the same
extent for all candidates. So this is repeated in several processes, one after the other: the table shows medians over
processes, and the range of their ratios. Nothing is timed before the native step has been shown to equal the eager one
bit for bit.

    python benchmarks/step_time.py [--processes 7] [--rounds 25] [--threads 2] [--output …json]
                                   [--algorithms | --states-in-8-bits | --instruction-sets] [--cpu-time]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peers.optimizers import is_installed, optimi_kahan
from tqdm import tqdm

from hf_lowprec import AdamW, __version__
from hf_lowprec.optim import ALGORITHMS
from hf_lowprec.optim.backends import native
from hf_lowprec.optim.backends.c_compiler import require_compiler

LR, DECAY = 1e-3, 0.01
Shapes = list[tuple[int, ...]]
Row = dict[str, Any]
Process = dict[str, list[Row]]
MODES = ("kahan", "split", "stochastic")
Candidates = Callable[[Shapes], dict[str, torch.optim.Optimizer]]
BASELINE = "torch AdamW, FP32, fused"
IN_8_BITS = ", states in 8 bits"


def traffic(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step moves: gradients are read, weights and states read and written."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(param.grad.nbytes for param in params) + 2 * sum(tensor.nbytes for tensor in (*params, *states))


def smollm2_135m() -> Shapes:
    """Parameters of SmolLM2-135M, a Llama with 30 layers: 272 tensors, tied embeddings."""
    hidden, intermediate, keys, vocabulary = 576, 1536, 192, 49152
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * 30, (hidden,)]


SETS: dict[str, Shapes] = {"64 × (512×1024)": [(512, 1024)] * 64, "SmolLM2-135M": smollm2_135m()}
IN_CACHE, IN_MEMORY = "1 × (512×1024)", "16 × (512×1024)"
CACHE_AND_MEMORY: dict[str, Shapes] = {IN_CACHE: [(512, 1024)], IN_MEMORY: [(512, 1024)] * 16}
"""The first set stays in a cache of 16 MiB, in FP32 too; the second is four times as large as one of 32 MiB."""
STEPS_IN_CACHE = 20
"""Steps of an optimizer in each of its turns, so that its tensors are in the cache, and not those of the others."""
INSTRUCTION_SETS = {
    "": "",
    ", 256-bit vectors": "-mprefer-vector-width=256",
    ", without AVX-512": "-mno-avx512f",
    ", x86-64-v4": "-march=x86-64-v4",
    ", x86-64-v3": "-march=x86-64-v3",
}
"""Further flags for the compiler, which take precedence over those of `c_compiler.py`, by what rows are called."""


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Build weights with gradients, both of ordinary magnitude."""
    params = [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(0.01)
    return params


def candidates(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """An optimizer per row of the table, each with parameters of its own."""

    def torch_fused(dtype: torch.dtype) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters(shapes, dtype), lr=LR, weight_decay=DECAY, fused=True)

    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch_fused(torch.float32),
        "torch AdamW, BF16, fused": torch_fused(torch.bfloat16),
    }
    if is_installed("torch-optimi"):
        params = parameters(shapes, torch.bfloat16)
        found["optimi AdamW, BF16, Kahan"] = optimi_kahan(params, lr=LR, weight_decay=DECAY)
    else:
        print("optimi is not installed (pip install torch-optimi): left out")
    for mode in ("kahan", "stochastic", "nearest"):
        found[f"hf_lowprec AdamW, {mode}"] = AdamW(
            parameters(shapes, torch.bfloat16), lr=LR, weight_decay=DECAY, rounding=mode, backend="native"
        )
    return found


def algorithms(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """Every algorithm of ours and the baseline; Muon steps only matrices, and leaves other tensors to AdamW."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    for (name, cls), mode in product(ALGORITHMS.items(), ("kahan", "stochastic")):
        params = parameters(shapes, torch.bfloat16)
        options = {"SGD": {"momentum": 0.9}, "Muon": {"matrices": [p for p in params if p.ndim == 2]}}.get(name, {})
        found[f"hf_lowprec {name}, {mode}"] = cls(params, lr=LR, rounding=mode, backend="native", **options)
    return found


def states_in_8_bits(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """The baseline, and optimizers of ours with states in BF16 and in 8 bits."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    modes: list[tuple[str, dict[str, Any]]] = [("AdamW", {"rounding": mode}) for mode in MODES]
    modes += [("Lion", {"rounding": "kahan"}), ("SGD", {"rounding": "kahan", "momentum": 0.9})]
    for (name, options), dtype in product(modes, (torch.bfloat16, torch.int8)):
        params = parameters(shapes, torch.bfloat16)
        row = f"hf_lowprec {name}, {options['rounding']}{IN_8_BITS if dtype == torch.int8 else ''}"
        found[row] = ALGORITHMS[name](params, lr=LR, state_dtype=dtype, backend="native", **options)
    return found


def instruction_sets(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """The baseline, and our modes in code for several instruction sets."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    compiler = shlex.join(require_compiler())
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(INSTRUCTION_SETS.items()):
            script = Path(folder, f"compiler-{number}")
            script.write_text(f'#!/bin/sh\nexec {compiler} "$@" {flags}\n')
            script.chmod(0o700)
            with _environment(CC=str(script), HF_LOWPREC_CACHE=f"{folder}/cache"):
                native._load.cache_clear()  # of what was compiled with the flags before
                check_parity([torch.bfloat16])
                for mode in MODES:
                    params = parameters(shapes, torch.bfloat16)
                    optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, backend="native")
                    optimizer.step()  # looks for the compiled code
                    found[f"hf_lowprec AdamW, {mode}{name}"] = optimizer
    return found


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and in the end what they were."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_parity(state_dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.int8)) -> None:
    """Exit if the compiled step does not give the bits of the eager one: the speed of a wrong step means nothing."""
    for mode, dtype in product((*MODES, "nearest"), state_dtypes):
        results = []
        for backend in ("eager", "native"):
            torch.manual_seed(0)
            params = parameters([(1000, 33), (100, 64), (7,)], torch.bfloat16)
            optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, state_dtype=dtype, backend=backend)
            for _ in range(3):
                optimizer.step()
            results.append([*params, *(v for s in optimizer.state.values() for v in s.values())])
        if not all(map(torch.equal, *results)):
            raise SystemExit(
                f"native and eager disagree for rounding={mode!r}, state_dtype={dtype}: no speed is reported"
            )


def _timed(action: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        action()
    return (clock() - start) / times


def measure(
    optimizers: dict[str, torch.optim.Optimizer], rounds: int, clock: Callable[[], float], steps: int = 1
) -> list[Row]:
    """Time the optimizers in interleaved rounds of some steps each. The first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds + 2):
        for name, optimizer in optimizers.items():
            times[name].append(_timed(optimizer.step, steps, clock))
    medians = {name: statistics.median(series[2:]) for name, series in times.items()}
    return [
        {
            "optimizer": name,
            "median_ms": 1e3 * median,
            "fastest_ms": 1e3 * min(times[name][2:]),
            "ratio": median / medians[BASELINE],
            "gigabytes_per_second": traffic(optimizers[name]) / median / 1e9,
        }
        for name, median in medians.items()
    ]


def run(threads: int, rounds: int, sets: dict[str, Shapes], build: Candidates, cpu_time: bool) -> Process:
    """Run the whole comparison in this process; returns rows by set of shapes."""
    torch.set_num_threads(threads)
    clock = (lambda: time.process_time() / threads) if cpu_time else time.perf_counter
    check_parity()
    rows = {}
    for name, shapes in sets.items():
        rows[name] = measure(build(shapes), rounds, clock, STEPS_IN_CACHE if name == IN_CACHE else 1)
        gc.collect()
    return rows


def table(title: str, processes: list[list[Row]]) -> str:
    """A Markdown table of medians over processes."""
    lines = [
        f"\n{title}, {len(processes)} processes\n",
        "| optimizer | ms | × FP32 fused | from … to | GB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for rows in zip(*processes, strict=True):
        ratios = [row["ratio"] for row in rows]
        time_ms, bandwidth = (
            statistics.median(row[key] for row in rows) for key in ("median_ms", "gigabytes_per_second")
        )
        lines.append(
            f"| {rows[0]['optimizer']} | {time_ms:.2f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} … {max(ratios):.2f} | {bandwidth:.0f} |"
        )
    return "\n".join(lines)


def table_of_8_bits(processes: list[list[Row]]) -> str:
    """A Markdown table of how long steps with states in 8 bits take, relative to the same with states in BF16."""
    lines = ["\n| optimizer | 8 bits / BF16 | from … to |", "|---|---:|---:|"]
    times = [{row["optimizer"]: row["median_ms"] for row in rows} for rows in processes]
    for name in (name for name in times[0] if name + IN_8_BITS in times[0]):
        ratios = [process[name + IN_8_BITS] / process[name] for process in times]
        lines.append(f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} … {max(ratios):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=25, help="in each process")
    rows = parser.add_mutually_exclusive_group()
    for name, build, text in (
        ("--algorithms", algorithms, "every algorithm of ours, on the first set of shapes"),
        ("--states-in-8-bits", states_in_8_bits, "and in BF16, on the first set of shapes"),
        ("--instruction-sets", instruction_sets, "of x86-64, in a cache and in memory"),
    ):
        rows.add_argument(name, dest="build", action="store_const", const=build, default=candidates, help=text)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="per thread, for a machine that others use meanwhile")
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/step-time-cpu-{date.today()}.json"))
    options = parser.parse_args()
    require_compiler()
    if options.cpu_time:
        os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait take no time

    first_set = dict(list(SETS.items())[:1])
    sets = {candidates: SETS, instruction_sets: CACHE_AND_MEMORY}.get(options.build, first_set)
    processes: list[Process] = []
    for _ in tqdm(range(options.processes), unit="process"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            arguments = (options.threads, options.rounds, sets, options.build, options.cpu_time)
            processes.append(fresh.submit(run, *arguments).result())

    for name, shapes in sets.items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        title = f"{name}: {len(shapes)} tensors, {count / 1e6:.1f} M parameters"
        print(table(title, [rows[name] for rows in processes]))
        if options.build is states_in_8_bits:
            print(table_of_8_bits([rows[name] for rows in processes]))
    result = {
        "machine": f"{platform.machine()}, {options.threads} threads",
        "versions": {"torch": torch.__version__, "hf_lowprec": __version__, "python": platform.python_version()},
        "processes": processes,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
