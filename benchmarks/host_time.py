"""Host time of one optimizer step by the number of tensors, with 16 elements each, so that computing takes no time.

Every step has new gradient tensors, as after `zero_grad`. On a GPU the launch comes on top; `make bench-gpu` measures
both.

    python benchmarks/host_time.py [--tensors 64 146 291 1000] [--rounds 50]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from hf_lowprec import AdamW


def milliseconds(tensors: int, rounds: int) -> float:
    """Median time of a step on `tensors` parameters."""
    params = [torch.nn.Parameter(torch.randn(16).bfloat16()) for _ in range(tensors)]
    optimizer = AdamW(params, backend="native")
    times = []
    for _ in range(rounds + 3):
        for param in params:
            param.grad = torch.randn(16).bfloat16()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return 1e3 * statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 146, 291, 1000])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| tensors | ms per step | µs per tensor |\n|---:|---:|---:|")
    for tensors in options.tensors:
        taken = milliseconds(tensors, options.rounds)
        print(f"| {tensors} | {taken:.2f} | {1e3 * taken / tensors:.1f} |")


if __name__ == "__main__":
    main()
