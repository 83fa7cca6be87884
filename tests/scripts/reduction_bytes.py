"""Bytes that four ranks send, counted by the kernel: run where the loopback interface carries nothing else.

reduction_bytes.py
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hf_lowprec.reduction import BucketAverager
from hf_lowprec.reduction.collectives import ScratchBuffers
from hf_lowprec.reduction.fsdp2 import FP32ReduceScatter
from tests.support.processes.worlds import run_worlds

RANKS = 4
ELEMENTS = 4 << 20
BUCKETS = 4
TURNS = 4
COUNTERS = Path("/proc/self/net/dev")  # that of this network namespace, unlike /sys
HEADER = 14 + 20 + 60
"""Most bytes of a packet without its payload: Ethernet, IPv4, TCP with all options; also of an acknowledgement."""
MESSAGE = 3 * 64
"""More than gloo adds to a message: headers of its notice that data is ready, of the answer, and of the data."""


@dataclass
class Traffic:
    """The traffic of all ranks in one reduction."""

    total: int
    packets: int


def sent() -> tuple[int, int]:
    """Bytes and packets so far."""
    (line,) = [line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:")]
    _, *counts = line.split()
    return int(counts[8]), int(counts[9])


def traffic(reduce: Callable[[], object]) -> Traffic:
    """The least of some turns: under load, TCP sends a segment again now and then."""
    turns = []
    for _ in range(TURNS + 1):
        dist.barrier()
        time.sleep(0.1)  # until the last acknowledgement is counted
        before = sent()
        dist.barrier()
        reduce()
        dist.barrier()
        time.sleep(0.1)
        turns.append(Traffic(*(after - start for after, start in zip(sent(), before, strict=True))))
    return min(turns[1:], key=lambda turn: turn.total)


def check() -> None:
    bucket = torch.ones(ELEMENTS, dtype=torch.bfloat16)
    fp32_bucket = torch.ones(ELEMENTS)
    averager = BucketAverager(dist.group.WORLD)
    scatter = FP32ReduceScatter(torch.bfloat16, ScratchBuffers(), fp32_output=True)
    shard = torch.empty(ELEMENTS // RANKS)

    def average() -> None:
        for number, part in enumerate(bucket.chunk(BUCKETS)):
            averager(part, number == 0, number == BUCKETS - 1)

    # reduce-scatter: a rank sends all parts but its own; all-gather: its own to all others
    once = (RANKS - 1) * bucket.nbytes
    measured = {
        "ours": (traffic(average), 2 * once),
        "native BF16": (traffic(lambda: dist.all_reduce(bucket)), 2 * once),
        "native FP32": (traffic(lambda: dist.all_reduce(fp32_bucket)), 4 * once),
        "our reduce-scatter": (traffic(lambda: scatter(shard, fp32_bucket, dist.group.WORLD, dist.ReduceOp.AVG)), once),
    }
    if dist.get_rank():
        return
    for name, (counted, expected) in measured.items():
        above = counted.total - expected
        print(
            f"{name}: {counted.total / RANKS:,.0f} bytes per rank, {expected / RANKS:,.0f} by definition, "
            f"{above / expected:.2%} and {above / counted.packets:.0f} bytes per packet above"
        )
    for name in ("ours", "our reduce-scatter"):
        counted, expected = measured[name]
        # Reduce-scatter and all-gather: RANKS - 1 messages each per rank and bucket; the two barriers have no more.
        most = HEADER * counted.packets + (2 * BUCKETS + 2) * RANKS * (RANKS - 1) * MESSAGE
        assert expected <= counted.total <= expected + most, (name, counted, expected)
        assert most < 0.01 * expected, (name, counted)
    ours, native, wider = (measured[name][0].total for name in ("ours", "native BF16", "native FP32"))
    assert abs(ours / native - 1) < 0.01, measured
    assert abs(ours / wider - 0.5) < 0.005, measured
    print("as many bytes as defined", flush=True)


if __name__ == "__main__":
    run_worlds(check, [RANKS])
