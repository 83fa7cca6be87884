"""Time of one optimizer step on the CPU: ours in each mode, compared with torch's fused AdamW and optimi.

All candidates step the same shapes, interleaved in one process, so that changes in the machine's speed affect all of
them equally; medians are compared. How fast a process is also depends on where its memory lies, and not to the same
extent for all candidates. So this is repeated in several processes, one after the other: the table shows medians over
processes, and the range of their ratios. Nothing is timed before the native step has been shown to equal the eager one
bit for bit.

    python benchmarks/step_time.py [--processes 7] [--rounds 25] [--threads 2] [--output …json]
                                   [--algorithms | --adafactor | --states-in-8-bits | --instruction-sets | --gradients]
                                   [--cpu-time]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from cpu_step.optimizers import (
    BASELINE,
    CACHE_AND_MEMORY,
    EMBEDDING_AND_EXPERTS,
    IN_CACHE,
    SETS,
    STEPS_IN_CACHE,
    Shapes,
    adafactor,
    algorithms,
    candidates,
    check_parity,
    instruction_sets,
    kinds_of_gradients,
    states_in_8_bits,
)
from cpu_step.processes import in_fresh_processes, write_result
from cpu_step.tables import Row, table, table_of_8_bits, table_of_gradients

from hf_lowprec.optim.backends.c.compiler import require_compiler

Process = dict[str, list[Row]]
Candidates = Callable[[Shapes], dict[str, torch.optim.Optimizer]]


def traffic(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step moves: gradients are read, weights and states read and written."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(param.grad.nbytes for param in params) + 2 * sum(tensor.nbytes for tensor in (*params, *states))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=25, help="in each process")
    rows = parser.add_mutually_exclusive_group()
    for name, build, text in (
        ("--algorithms", algorithms, "every algorithm of ours, on the first set of shapes"),
        ("--adafactor", adafactor, "ours, torch's, and our AdamW, on the first set of shapes"),
        ("--states-in-8-bits", states_in_8_bits, "and in BF16, on the first set of shapes"),
        ("--instruction-sets", instruction_sets, "of x86-64, in a cache and in memory"),
        ("--gradients", kinds_of_gradients, "with zeros, subnormal numbers, views of a bucket"),
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
    special = {candidates: SETS, instruction_sets: CACHE_AND_MEMORY, kinds_of_gradients: EMBEDDING_AND_EXPERTS}
    sets = special.get(options.build, first_set)
    arguments = (options.threads, options.rounds, sets, options.build, options.cpu_time)
    processes = in_fresh_processes(options.processes, run, *arguments)

    for name, shapes in sets.items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        title = f"{name}: {len(shapes)} tensors, {count / 1e6:.1f} M parameters"
        print(title if options.build is kinds_of_gradients else table(title, [rows[name] for rows in processes]))
        if options.build is states_in_8_bits:
            print(table_of_8_bits([rows[name] for rows in processes]))
        if options.build is kinds_of_gradients:
            print(table_of_gradients([rows[name] for rows in processes]))
    write_result(options.output, options.threads, processes=processes)


if __name__ == "__main__":
    main()
