"""Scratch memory, and the bytes that four ranks send, counted by the kernel: as many as a native reduction of BF16."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_lowprec.reduction import BucketAverager
from hf_lowprec.reduction.collectives import ScratchBuffers
from hf_lowprec.reduction.fsdp2 import FP32ReduceScatter
from tests.support.processes.ranks import SCRIPTS

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
    dist.init_process_group("gloo")
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


def test_scratch_memory_is_kept_by_name_and_dtype_and_grows_to_the_largest_size() -> None:
    scratch, like = ScratchBuffers(), torch.empty(0, dtype=torch.bfloat16)
    first = scratch.get("received", 10, like)
    assert (first.shape, first.dtype, scratch.nbytes) == ((10,), torch.bfloat16, 20)
    assert scratch.get("received", 4, like).data_ptr() == first.data_ptr()
    assert scratch.get("padded", 3, like).data_ptr() != first.data_ptr()
    assert scratch.get("received", 3, like.float()).dtype == torch.float32
    assert scratch.get("received", 11, like).shape == (11,)
    assert scratch.nbytes == 22 + 6 + 12


def namespace() -> tuple[str, ...]:
    """A command that runs another one with a loopback interface of its own; skips where that is not possible."""
    lift = 'ip link set lo up && exec "$@"'
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        within = (*command, "sh", "-c", lift, "sh")
        if (
            shutil.which(command[0])
            and subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0
        ):
            return within
    pytest.skip("no network namespace can be made here (needs Linux, unshare, ip, and the right to do so)")


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_travel_in_as_many_bytes_as_a_native_reduction_of_bf16():
    """Each rank sends 2 (N − 1) / N times the bucket, half as much as in FP32."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*namespace(), sys.executable, str(SCRIPTS / "forked_ranks.py"), str(RANKS), f"{__name__}:check"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
