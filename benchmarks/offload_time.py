"""Time of a step with states on the host: the step, measured on this CPU, and the copies, computed from bandwidths.

The host's part is compared with the ordinary step of the `native` backend on the same tensors, in one process and in
turns: the ratio of the medians, without copies, which are the work of a GPU. The second table is arithmetic: bytes that
a step moves, divided by bandwidths as they are specified.

    python benchmarks/offload_time.py [--threads 2] [--rounds 25] [--parameters 8e9] [--output …json]

On a GPU, whole steps are measured, and what limits them: copies of pinned memory, and steps of the host alone:

    python benchmarks/offload_time.py --device cuda --threads 16 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.offload import device_copies, host_steps
from tests.support.optim.simulated_copies import SimulatedCopies

RESULTS = Path(__file__).parent / "results"
SHAPES = [(4096, 1024), (1024, 4096), (4096,)] * 4
MODES = {
    "split": {"rounding": "split"},
    "Kahan": {"rounding": "kahan"},
    "stochastic": {"rounding": "stochastic"},
    "split, 8-bit states": {"rounding": "split", "state_dtype": torch.int8},
}
TO_HOST, BACK = 4, 2
"""Bytes per parameter that are copied: weight and gradient, and the new weight."""
STEPPED = 18
"""Bytes of host memory per parameter that a split step reads and writes: weight, remainder, two moments, gradient."""
LINKS = {"PCIe 4.0 × 16": 31.5e9, "PCIe 5.0 × 16": 63e9, "NVLink-C2C (GH200)": 450e9}
"""Bytes per second and direction."""
MEMORIES = {"two channels of DDR5-5600": 89.6e9, "eight channels of DDR5-4800": 307.2e9}
"""Bytes per second."""


@contextmanager
def on_a_simulated_device() -> Iterator[None]:
    """Treat the CPU as a device, whose copies are made at once, and not while a bucket is stepped."""
    with (
        patch.object(host_steps, "SLOTS", 1),
        patch.object(device_copies, "is_host", lambda device: False),
        patch.object(device_copies, "DeviceCopies", lambda device: SimulatedCopies(share=1.0)),
    ):
        yield


def optimizer(**options: object) -> AdamW:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    return AdamW(params, lr=1e-3, **options)


def measure(rounds: int) -> list[dict[str, object]]:
    """Median nanoseconds per parameter of the ordinary step, and of the host's part of the other one."""
    rows = []
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    step = host_steps.Bucket.step
    spent = [0.0]

    def timed(bucket: host_steps.Bucket) -> list[device_copies.Pair]:
        start = time.perf_counter()
        pairs = step(bucket)
        spent[0] += time.perf_counter() - start
        return pairs

    for name, options in MODES.items():
        ordinary, offloaded = optimizer(**options), optimizer(**options, offload_states=True)
        times: dict[str, list[float]] = {"ordinary": [], "host": []}
        with patch.object(host_steps.Bucket, "step", timed):
            for _ in range(rounds):
                start = time.perf_counter()
                ordinary.step()
                times["ordinary"].append(time.perf_counter() - start)
                spent[0] = 0.0
                offloaded.step()
                times["host"].append(spent[0])
        medians = {key: statistics.median(values[2:]) * 1e9 / count for key, values in times.items()}
        rows.append({"mode": name, **medians, "ratio": medians["host"] / medians["ordinary"]})
    return rows


def measure_on_gpu(rounds: int) -> list[dict[str, object]]:
    """Median nanoseconds per parameter of a step with states on the host, and of an ordinary one on the host."""
    rows = []
    for name, options in MODES.items():
        device = [torch.nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in SHAPES * 12]
        host = [torch.nn.Parameter(param.detach().cpu()) for param in device]
        count = sum(param.numel() for param in host)
        for param, on_host in zip(device, host, strict=True):
            param.grad = torch.randn(param.shape, device="cuda").bfloat16()
            on_host.grad = param.grad.cpu()
        optimizers = {
            "host alone": AdamW(host, lr=1e-3, **options),
            "states on the host": AdamW(device, lr=1e-3, offload_states=True, **options),
        }
        times: dict[str, list[float]] = {key: [] for key in optimizers}
        for _ in range(rounds):
            for key, each in optimizers.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                each.step()
                torch.cuda.synchronize()
                times[key].append(time.perf_counter() - start)
        medians = {key: statistics.median(values[2:]) * 1e9 / count for key, values in times.items()}
        rows.append({"mode": name, "parameters": count, **medians})
    return rows


def copy_bandwidths() -> dict[str, float]:
    """Bytes per second of copies of pinned memory, in each direction alone."""
    host, device = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 29, device="cuda").byte()
    found = {}
    for name, (target, source) in {"to the host": (host, device), "to the GPU": (device, host)}.items():
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found[name] = host.numel() / statistics.median(seconds)
    return found


def table_of_steps(rows: list[dict[str, object]]) -> str:
    lines = ["| mode | ordinary step, ns per parameter | host's part | ratio |", "|---|---:|---:|---:|"]
    lines += ["| {mode} | {ordinary:.2f} | {host:.2f} | {ratio:.2f} |".format(**row) for row in rows]
    return "\n".join(lines)


def table_of_copies(parameters: float) -> str:
    """Seconds of each part of a split step; the slowest hides the others."""
    lines = ["| limit | bytes per parameter | seconds |", "|---|---:|---:|"]
    for link, bandwidth in LINKS.items():
        lines.append(f"| {link}, to the host | {TO_HOST} | {TO_HOST * parameters / bandwidth:.2f} |")
    for memory, bandwidth in MEMORIES.items():
        moved = STEPPED + TO_HOST + BACK
        lines.append(f"| host memory, {memory} | {moved} | {moved * parameters / bandwidth:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", type=float, default=8e9)
    parser.add_argument("--output", type=Path, default=RESULTS / f"offload-time-{date.today().isoformat()}.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record: dict[str, object] = {"threads": options.threads, "torch": torch.__version__}
    if options.device == "cuda":
        record |= {"gpu": torch.cuda.get_device_name(), "bytes per second": copy_bandwidths()}
        record["rows"] = measure_on_gpu(options.rounds)
        print(json.dumps(record, indent=1))
    else:
        with on_a_simulated_device():
            record["rows"] = rows = measure(options.rounds)
        print(f"{table_of_steps(rows)}\n\n{table_of_copies(options.parameters)}")
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
