"""Time and memory of one step of Muon on the CPU: ours in each mode, compared with `torch.optim.Muon` on FP32 weights.

All candidates step matrices of the same shape, interleaved in one process, so that changes in the machine's speed
affect all of them equally: a ratio is that of two steps of the same round, and medians of ratios are reported, over
several processes. With one thread, CPU time is compared, so that other processes matter little; with more, wall time,
since threads that wait for each other take CPU time. torch's Muon takes no stacks of matrices; it steps those of a
stack as matrices of their own. It orthogonalizes in BF16 as well, by the same fifteen matrix products; the last column
is their time, as torch computes them, relative to the FP32 step. Nothing is timed before the native step has been shown
to equal the eager one bit for bit.

    python benchmarks/muon_step_time.py [--processes 3] [--rounds 7] [--threads 1] [--output …json]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from cpu_step.processes import in_fresh_processes, write_result

from hf_lowprec import Muon
from hf_lowprec.optim.backends.c.compiler import require_compiler
from hf_lowprec.tools.estimate.live_memory import LiveMemory

Shape = tuple[int, ...]
Row = dict[str, Any]
MODES = ("kahan", "split", "stochastic")
BASELINE = "torch Muon, FP32"
SHAPES: list[tuple[int, Shape]] = [
    (4, (512, 1024)),
    (1, (1024, 1024)),
    (2, (2048, 512)),
    (1, (4096, 1024)),
    (128, (64, 64)),
    (64, (128, 128)),
    (16, (256, 256)),
    (1, (8, 256, 512)),
]
"""How many parameters of which shape are stepped."""


def parameters(count: int, shape: Shape, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Build weights with gradients, both of ordinary magnitude."""
    params = [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param).mul_(0.01)
    return params


def candidates(count: int, shape: Shape) -> dict[str, torch.optim.Optimizer]:
    """An optimizer per row of the table, each with parameters of its own."""
    matrices = count * math.prod(shape[:-2])

    def of_torch(dtype: torch.dtype) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters(matrices, shape[-2:], dtype), adjust_lr_fn="match_rms_adamw")

    found = {BASELINE: of_torch(torch.float32), "torch Muon, BF16": of_torch(torch.bfloat16)}
    for mode in MODES:
        params = parameters(count, shape, torch.bfloat16)
        found[f"hf_lowprec Muon, {mode}"] = Muon(params, rounding=mode, backend="native")
    return found


def check_parity() -> None:
    """Exit if the compiled step does not give the bits of the eager one: the speed of a wrong step means nothing."""
    for mode in MODES:
        results = []
        for backend in ("eager", "native"):
            torch.manual_seed(0)
            params = [param for _, shape in SHAPES for param in parameters(2, (*shape[:-2], 48, 40), torch.bfloat16)]
            optimizer = Muon(params, rounding=mode, backend=backend)
            for _ in range(3):
                optimizer.step()
            results.append([*params, *(v for s in optimizer.state.values() for v in s.values())])
        if not all(map(torch.equal, *results)):
            raise SystemExit(f"native and eager disagree for rounding={mode!r}: no speed is reported")


def _timed(action: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    action()
    return clock() - start


def products_time(count: int, shape: Shape) -> float:
    """Seconds that the matrix products of one step take by themselves, one matrix at a time."""
    rows, columns = sorted(shape[-2:])
    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    gram = torch.randn(rows, rows, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(count * math.prod(shape[:-2]) * 5):
            x @ x.mT
            torch.addmm(gram, gram, gram, beta=0.5, alpha=0.5)
            torch.addmm(x, gram, x, beta=0.5)

    return _timed(products)


def measure(count: int, shape: Shape, rounds: int) -> list[Row]:
    """Time the optimizers in interleaved rounds, of which the first two warm up."""
    optimizers = candidates(count, shape)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    products = []
    for _ in range(rounds + 2):
        for name, optimizer in optimizers.items():
            times[name].append(_timed(optimizer.step))
        products.append(products_time(count, shape))
    rows = []
    for name, optimizer in optimizers.items():
        with LiveMemory() as memory:
            optimizer.step()
        rows.append(
            {
                "optimizer": name,
                "median_ms": 1e3 * statistics.median(times[name][2:]),
                "ratio": _median_ratio(times[name], times[BASELINE]),
                "products": _median_ratio(products, times[BASELINE]),
                "peak_bytes": memory.peak,
            }
        )
    return rows


def _median_ratio(times: list[float], baseline: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(times[2:], baseline[2:], strict=True))


def run(threads: int, rounds: int, shapes: list[tuple[int, Shape]] = SHAPES) -> list[list[Row]]:
    """Run the whole comparison in this process; returns rows by shape."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    check_parity()
    return [measure(count, shape, rounds) for count, shape in shapes]


def table(processes: list[list[list[Row]]], shapes: list[tuple[int, Shape]] = SHAPES) -> str:
    """A Markdown table of medians over processes."""
    names = [row["optimizer"] for row in processes[0][0]]
    lines = [
        f"| matrices | {BASELINE}, ms | {' | '.join(names[1:])} | peak of FP32, of ours, MB | products alone |",
        f"|---|{'---:|' * (len(names) + 2)}",
    ]
    for k, (count, shape) in enumerate(shapes):
        measured = [process[k] for process in processes]
        ratios = [[rows[j]["ratio"] for rows in measured] for j in range(1, len(names))]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f} … {max(r):.2f})" for r in ratios]
        baseline = statistics.median(rows[0]["median_ms"] for rows in measured)
        peaks = ", ".join(f"{measured[0][j]['peak_bytes'] / 1e6:.2f}" for j in (0, 2))
        products = statistics.median(rows[0]["products"] for rows in measured)
        title = f"{count} × ({' × '.join(map(str, shape))})"
        lines.append(f"| {title} | {baseline:.1f} | {' | '.join(cells)} | {peaks} | {products:.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="in each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/muon-step-time-{date.today()}.json"))
    options = parser.parse_args(arguments)
    require_compiler()

    processes = in_fresh_processes(options.processes, run, options.threads, options.rounds)
    print(table(processes))
    clock = "CPU time" if options.threads == 1 else "wall time"
    write_result(options.output, options.threads, clock=clock, shapes=SHAPES, processes=processes)


if __name__ == "__main__":
    main()
