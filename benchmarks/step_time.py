"""Time of one optimizer step on the CPU: ours in each mode, compared with torch's fused AdamW and optimi.

All candidates step the same shapes, interleaved in one process, so that changes in the machine's speed affect all of
them equally; medians are compared. How fast a process is also depends on where its memory lies, and not to the same
extent for all candidates. So this is repeated in several processes, one after the other: the table shows medians over
processes, and the range of their ratios. Nothing is timed before the native step has been shown to equal the eager one
bit for bit.

    python -m benchmarks.step_time [--processes 7] [--rounds 25] [--threads 2] [--output FILE.json]
                                   [--algorithms | --states-in-8-bits]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.optimizers import is_installed, optimi_kahan
from benchmarks.record import write_record
from hf_lowprec import AdamW
from hf_lowprec.optim import ALGORITHMS
from hf_lowprec.optim.backends.c.compiler import require_compiler

LR, DECAY = 1e-3, 0.01
BF16, FP32 = torch.bfloat16, torch.float32
BASELINE = "torch AdamW, FP32, fused"
IN_8_BITS = ", states in 8 bits"
Shapes = list[tuple[int, ...]]
Row = dict[str, Any]
Optimizers = dict[str, torch.optim.Optimizer]


def smollm2_135m() -> Shapes:
    """Parameters of SmolLM2-135M, a Llama with 30 layers: 272 tensors, tied embeddings."""
    hidden, intermediate, keys, vocabulary = 576, 1536, 192, 49152
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * 30, (hidden,)]


SETS: dict[str, Shapes] = {"64 × (512×1024)": [(512, 1024)] * 64, "SmolLM2-135M": smollm2_135m()}


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Build weights with gradients, both of ordinary magnitude."""
    params = [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(0.01)
    return params


def torch_fused(shapes: Shapes, dtype: torch.dtype) -> torch.optim.Optimizer:
    """torch's AdamW."""
    return torch.optim.AdamW(parameters(shapes, dtype), lr=LR, weight_decay=DECAY, fused=True)


def modes(shapes: Shapes) -> Optimizers:
    """An optimizer per row of the table, each with parameters of its own."""
    found = {BASELINE: torch_fused(shapes, FP32), "torch AdamW, BF16, fused": torch_fused(shapes, BF16)}
    if is_installed("torch-optimi"):
        found["optimi AdamW, BF16, Kahan"] = optimi_kahan(parameters(shapes, BF16), lr=LR, weight_decay=DECAY)
    else:
        print("optimi is not installed (pip install torch-optimi): left out")
    rows: dict[str, dict[str, Any]] = {mode: {"rounding": mode} for mode in ("split", "kahan", "stochastic", "nearest")}
    rows["stochastic without feedback"] = {"rounding": "stochastic", "error_feedback": False}
    rows["stochastic, factored"] = {"rounding": "stochastic", "factored": True}
    for name, options in rows.items():
        params = parameters(shapes, BF16)
        found[f"hf_lowprec AdamW, {name}"] = AdamW(params, lr=LR, weight_decay=DECAY, backend="native", **options)
    return found


def algorithms(shapes: Shapes) -> Optimizers:
    """Every algorithm of ours and the baseline; Muon steps only matrices, and leaves other tensors to AdamW."""
    found = {BASELINE: torch_fused(shapes, FP32)}
    for (name, cls), mode in product(ALGORITHMS.items(), ("kahan", "stochastic")):
        params = parameters(shapes, BF16)
        options = {"SGD": {"momentum": 0.9}, "Muon": {"matrices": [p for p in params if p.ndim == 2]}}.get(name, {})
        found[f"hf_lowprec {name}, {mode}"] = cls(params, lr=LR, rounding=mode, backend="native", **options)
    return found


def states_in_8_bits(shapes: Shapes) -> Optimizers:
    """The baseline, and optimizers of ours with states in BF16 and in 8 bits."""
    found = {BASELINE: torch_fused(shapes, FP32)}
    rows: list[tuple[str, dict[str, Any]]] = [
        *(("AdamW", {"rounding": mode}) for mode in ("kahan", "split", "stochastic")),
        ("Lion", {"rounding": "kahan"}),
        ("SGD", {"rounding": "kahan", "momentum": 0.9}),
    ]
    for (name, options), dtype in product(rows, (BF16, torch.int8)):
        row = f"hf_lowprec {name}, {options['rounding']}{IN_8_BITS if dtype == torch.int8 else ''}"
        params = parameters(shapes, BF16)
        found[row] = ALGORITHMS[name](params, lr=LR, state_dtype=dtype, backend="native", **options)
    return found


def check_parity() -> None:
    """Exit if the compiled step does not give the bits of the eager one: the speed of a wrong step means nothing."""
    for mode, dtype in product(("kahan", "split", "stochastic", "nearest"), (BF16, torch.int8)):
        results = []
        for backend in ("eager", "native"):
            torch.manual_seed(0)
            params = parameters([(1000, 33), (100, 64), (7,)], BF16)
            optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, state_dtype=dtype, backend=backend)
            for _ in range(3):
                optimizer.step()
            results.append([*params, *(v for s in optimizer.state.values() for v in s.values())])
        if not all(map(torch.equal, *results)):
            raise SystemExit(
                f"native and eager disagree for rounding={mode!r}, state_dtype={dtype}: no speed is reported"
            )


def traffic(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step moves: gradients are read, weights and states read and written."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(param.grad.nbytes for param in params) + 2 * sum(tensor.nbytes for tensor in (*params, *states))


def measure(optimizers: Optimizers, rounds: int) -> list[Row]:
    """Time a step of each optimizer in every round. The first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds + 2):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(series[2:]) for name, series in times.items()}
    return [
        {
            "optimizer": name,
            "median_ms": 1e3 * median,
            "ratio": median / medians[BASELINE],
            "gigabytes_per_second": traffic(optimizers[name]) / median / 1e9,
        }
        for name, median in medians.items()
    ]


def run(threads: int, rounds: int, sets: dict[str, Shapes], build: Callable[[Shapes], Optimizers]) -> dict[str, Any]:
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
        medians = [statistics.median(row[key] for row in rows) for key in ("median_ms", "gigabytes_per_second")]
        lines.append(
            f"| {rows[0]['optimizer']} | {medians[0]:.2f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} … {max(ratios):.2f} | {medians[1]:.0f} |"
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=25, help="in each process")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    rows = parser.add_mutually_exclusive_group()
    for name, build, text in (
        ("--algorithms", algorithms, "every algorithm of ours, on the first set of shapes"),
        ("--states-in-8-bits", states_in_8_bits, "and in BF16, on the first set of shapes"),
    ):
        rows.add_argument(name, dest="build", action="store_const", const=build, default=modes, help=text)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    require_compiler()
    sets = SETS if options.build is modes else dict(list(SETS.items())[:1])
    processes = []
    for _ in range(options.processes):  # memory lies elsewhere in each
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            processes.append(fresh.submit(run, options.threads, options.rounds, sets, options.build).result())
    for name, shapes in sets.items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        found = [rows[name] for rows in processes]
        print(table(f"{name}: {len(shapes)} tensors, {count / 1e6:.1f} M parameters", found))
        if options.build is states_in_8_bits:
            print(table_of_8_bits(found))
    write_record(options.output, processes=processes)


if __name__ == "__main__":
    main()
