"""Time of one optimizer step on the CPU: ours in each mode, compared with torch's fused AdamW and optimi.

All candidates step the same shapes, interleaved in one process, so that changes in the machine's speed affect all of
them equally; medians are compared. How fast a process is also depends on where its memory lies, and not to the same
extent for all candidates. So this is repeated in several processes, one after the other: the table shows medians over
processes, and the range of their ratios. Nothing is timed before the native step has been shown to equal the eager one
bit for bit. With `--threads 1`, times are CPU times of the thread, which other programs disturb less.

    python benchmarks/step_time.py [--processes 7] [--rounds 25] [--threads 2] [--output …json]
                                   [--algorithms | --states-in-8-bits | --gradients]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gradient_kinds import KINDS, RANDOM, give_gradients
from gradient_kinds import shapes as embedding_and_experts
from peers.optimizers import is_installed, optimi_kahan
from tqdm import tqdm

from hf_lowprec import AdamW, __version__
from hf_lowprec.optim import ALGORITHMS
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


EMBEDDING_AND_EXPERTS: dict[str, Shapes] = {
    "embedding (8192×512), 16 experts (512×512)": embedding_and_experts(8192, 512, 16, 512)
}


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


def kinds_of_gradients(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """`candidates` without those that round to nearest, with gradients of each kind."""
    found = {}
    for kind in KINDS:
        for name, optimizer in candidates(shapes).items():
            if not name.endswith(("BF16, fused", "nearest")):
                give_gradients(optimizer.param_groups[0]["params"], kind)
                found[name if kind == RANDOM else f"{name}; {kind}"] = optimizer
    return found


def check_parity() -> None:
    """Exit if the compiled step does not give the bits of the eager one: the speed of a wrong step means nothing."""
    for mode, dtype in product((*MODES, "nearest"), (torch.bfloat16, torch.int8)):
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


def _timed(action: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    action()
    return clock() - start


def measure(optimizers: dict[str, torch.optim.Optimizer], rounds: int) -> list[Row]:
    """Time the optimizers in interleaved rounds, of which the first two warm up."""
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds + 2):
        for name, optimizer in optimizers.items():
            times[name].append(_timed(optimizer.step))
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


def run(threads: int, rounds: int, sets: dict[str, Shapes], build: Candidates) -> Process:
    """Run the whole comparison in this process; returns rows by set of shapes."""
    torch.set_num_threads(threads)
    check_parity()
    rows = {}
    for name, shapes in sets.items():
        rows[name] = measure(build(shapes), rounds)
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


def table_of_gradients(processes: list[list[Row]]) -> str:
    """A Markdown table of how long steps take with each kind of gradients, relative to random ones."""
    times = [{row["optimizer"]: row["median_ms"] for row in rows} for rows in processes]
    names = [name for name in times[0] if "; " not in name]
    lines = [f"\n| gradients | share | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for kind in KINDS:
        if kind != RANDOM:
            (shapes,) = EMBEDDING_AND_EXPERTS.values()
            share = give_gradients(parameters(shapes, torch.bfloat16), kind)
            ratios = [[process[f"{name}; {kind}"] / process[name] for process in times] for name in names]
            cells = [f"{statistics.median(found):.2f} ({min(found):.2f} … {max(found):.2f})" for found in ratios]
            lines.append(f"| {kind} | {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=25, help="in each process")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--algorithms", action="store_true", help="every algorithm of ours, on the first set of shapes")
    rows.add_argument("--states-in-8-bits", action="store_true", help="and in BF16, on the first set of shapes")
    rows.add_argument("--gradients", action="store_true", help="zeros, subnormal numbers, views of a bucket")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/step-time-cpu-{date.today()}.json"))
    options = parser.parse_args()
    require_compiler()

    build, sets = candidates, SETS
    if options.algorithms or options.states_in_8_bits:
        build, sets = algorithms if options.algorithms else states_in_8_bits, dict(list(SETS.items())[:1])
    elif options.gradients:
        build, sets = kinds_of_gradients, EMBEDDING_AND_EXPERTS
    processes: list[Process] = []
    for _ in tqdm(range(options.processes), unit="process"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            processes.append(fresh.submit(run, options.threads, options.rounds, sets, build).result())

    for name, shapes in sets.items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        title = f"{name}: {len(shapes)} tensors, {count / 1e6:.1f} M parameters"
        print(title if options.gradients else table(title, [rows[name] for rows in processes]))
        if options.states_in_8_bits:
            print(table_of_8_bits([rows[name] for rows in processes]))
        if options.gradients:
            print(table_of_gradients([rows[name] for rows in processes]))
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
