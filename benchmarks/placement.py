"""Does it matter to a step's time where the machine puts its two cores? FP32's AdamW is compared with ours.

Cores of one chiplet share its link to memory; two chiplets have two. A virtual machine's cores move between them
unnoticed while it runs. The time that a cache line takes from one core to the other tells where they are: on AMD's EPYC
some 25 ns within a chiplet and over 100 ns between two. It is measured before and after every step, and steps during
which it changed are left out.

    python benchmarks/placement.py [--seconds 120] [--output …json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from cpu_step.optimizers import BASELINE, DECAY, LR, SETS, Shapes, check_parity, parameters

from hf_lowprec import AdamW

NEAR = 60.0
"""Nanoseconds up to which two cores count as one chiplet's."""

_EXCHANGE = """
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

static _Alignas(64) atomic_int turn;
static int rounds, first, second;

static void run_on(int core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *answer(void *unused)
{
    run_on(second);
    for (int i = 0; i <= rounds; i++) {
        while (atomic_load(&turn) != 2 * i + 1);
        atomic_store(&turn, 2 * i + 2);
    }
    return unused;
}

/* Seconds that a cache line takes to the other core, on average; the first exchange waits for the thread to start. */
double latency(int of, int to, int exchanges)
{
    cpu_set_t before;
    pthread_t other;
    struct timespec start = {0}, end;
    first = of, second = to, rounds = exchanges, turn = 0;
    pthread_getaffinity_np(pthread_self(), sizeof before, &before);
    pthread_create(&other, 0, answer, 0);
    run_on(first);
    for (int i = 0; i <= rounds; i++) {
        if (i == 1) clock_gettime(CLOCK_MONOTONIC, &start);
        atomic_store(&turn, 2 * i + 1);
        while (atomic_load(&turn) != 2 * i + 2);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    pthread_join(other, 0);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    return ((double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec)) / exchanges / 2;
}
"""


def measured_latency() -> Callable[[], float]:
    """A function that returns the nanoseconds that a cache line takes between this process's two cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != 2:
        raise SystemExit(f"this process may run on {len(cores)} cores; choose two, as in `taskset -c 0,1 python …`")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "exchange.c"), Path(folder, "exchange.so")
        source.write_text(_EXCHANGE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
        latency = ctypes.CDLL(str(library)).latency
    latency.restype = ctypes.c_double
    return lambda: 1e9 * latency(*cores, 5000)


def build_optimizers(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """FP32's fused AdamW and ours."""
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(parameters(shapes, torch.float32), lr=LR, weight_decay=DECAY, fused=True)
    }
    for mode in ("kahan", "stochastic"):
        params = parameters(shapes, torch.bfloat16)
        found[mode] = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, backend="native")
    return found


def measure(seconds: float) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of steps by placement and optimizer; placement's own entry holds the latencies."""
    latency = measured_latency()
    optimizers = build_optimizers(next(iter(SETS.values())))
    for optimizer in optimizers.values():
        optimizer.step()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, optimizer in optimizers.items():
            before, start = latency(), time.perf_counter()
            optimizer.step()
            taken, after = time.perf_counter() - start, latency()
            if (before < NEAR) == (after < NEAR):
                cores = "one chiplet" if before < NEAR else "two chiplets"
                found[cores][name].append(round(1e3 * taken, 2))
                found[cores]["latency"] += [round(before), round(after)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/placement-{date.today()}.json"))
    options = parser.parse_args()
    torch.set_num_threads(2)
    check_parity()
    found = measure(options.seconds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found) + "\n")

    print("\n| cores on | steps | latency, ns | FP32 fused, ms | Kahan, ms | stochastic, ms | × | × |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for cores, times in found.items():
        if len(times) < 4:  # seen by some of the optimizers only
            continue
        latency, fp32, kahan, stochastic = (
            statistics.median(times[name]) for name in ("latency", BASELINE, "kahan", "stochastic")
        )
        print(
            f"| {cores} | {len(times[BASELINE])} | {latency:.0f} | {fp32:.1f} | {kahan:.1f} | {stochastic:.1f} "
            f"| {kahan / fp32:.2f} | {stochastic / fp32:.2f} |"
        )
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
