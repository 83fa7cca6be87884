"""A model of how fast a GPU can execute a compiled kernel: each limit on its own, and the lowest of them.

- memory: the bytes per element at `REACHED_BANDWIDTH` of the advertised bandwidth.
- issue: each of a multiprocessor's four schedulers issues one instruction of a warp per clock.
- fp32 units: FP32 arithmetic and integer multiply-adds, which the same units execute.
- multiply, integer, convert, fp64: each of the other pipes, see `sass.PIPES`.
- latency: a warp waits `LATENCY` for its loads, then needs the scheduler for its instructions. N warps per scheduler
  finish at most N iterations in the time of one (Little's law).

Everything overlaps perfectly but what the last one says, so no kernel is faster, and real ones are slower where two
limits are close.
"""

from __future__ import annotations

from typing import Any

from compiled.gpus import ARCHITECTURES, Gpu

REACHED_BANDWIDTH = 0.92
"""Of the advertised one: what copies within device memory reach at best."""
LATENCY = 0.8e-6
"""Seconds until loads from memory arrive while memory is busy: about twice those of an idle GPU. An assumption."""
LOOKUP_LATENCY = 0.3e-6
"""The same for loads of tables, which are in the second-level cache. An assumption."""
WARP = 32


def speed_limits(row: dict[str, Any], gpu: Gpu) -> dict[str, float]:
    """The least time per element, in seconds, by each limit.

    Args:
        row: a kernel as `compiled_step.py` records it, compiled for `gpu.architecture`.
    """
    rates, by_pipe = ARCHITECTURES[gpu.architecture].rates, row["by_pipe"]
    operations = {
        "issue": row["hot"] + row["outside"],
        "fp32 units": by_pipe["fp32"] + by_pipe["multiply"],
        **{pipe: by_pipe[pipe] for pipe in ("multiply", "integer", "convert", "fp64")},
    }
    moved = row["read_bytes"] + row["written_bytes"]
    limits = {"memory": moved / (REACHED_BANDWIDTH * gpu.bandwidth), "latency": _latency_limit(row, gpu)}
    return limits | {
        name: count / (rates[name] * gpu.multiprocessors * gpu.clock) for name, count in operations.items()
    }


def _latency_limit(row: dict[str, Any], gpu: Gpu) -> float:
    """Seconds per element if nothing limits the step but waiting for loads."""
    elements = row["elements"] * row["iterations"]
    instructions = (row["hot"] + row["outside"]) * elements
    seconds = row["iterations"] * LATENCY + row["lookups"] * LOOKUP_LATENCY + instructions / gpu.clock
    return seconds / (gpu.multiprocessors * row["warps"] * WARP * elements)
