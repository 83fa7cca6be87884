"""Step time of two-rank training with FP32-accumulated gradients, relative to native BF16 reductions.

A Llama, cast to BF16, is trained by two processes on gloo, each with one thread: under DDP (default buckets) and under
FSDP2 (a group per layer, norms in FP32 as a group of their own), once with torch's own reduction and once with ours.
Both ways live in the same processes and take turns, in an order that is reversed each round, so that changes in the
machine's speed affect all of them equally. Reported are the median and the quartiles of the rounds' ratios. Processor
time is that of all threads of both processes; it excludes waiting and other programs.

Then DDP's reduction alone, on one bucket of 25 MB, where no computation hides its time, and native FP32, which moves
twice the bytes.

    python -m benchmarks.reduction_overhead [--rounds 32] [--tokens 256] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import write_record
from hf_lowprec import AdamW, cast_model
from hf_lowprec.reduction import BucketAverager, reduce_in_fp32, reduce_scatter_in_fp32, shard_fp32_parameters

RANKS, VOCABULARY = 2, 8192
BUCKET = 25 * 2**20
NATIVE = "native"
Action = Callable[[], object]


def training_step(kind: str, way: str, options: argparse.Namespace) -> Action:
    """A function that takes a step under `kind`, with our reduction or the native one."""
    width = options.width
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=options.layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).train()
    cast_model(model)
    if kind == "DDP":
        wrapped: nn.Module = DistributedDataParallel(model)
        if way != NATIVE:
            reduce_in_fp32(wrapped)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        shard_fp32_parameters(model, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if way != NATIVE:
            reduce_scatter_in_fp32(wrapped)
    optimizer = AdamW(wrapped.parameters(), lr=1e-4, rounding="kahan")  # as recorded
    length = min(options.tokens, 128)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (options.tokens // length, length), generator=generator)

    def step() -> None:
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bucket_actions() -> dict[str, Action]:
    """The reductions of a bucket."""
    own = torch.randn(BUCKET // 2, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    wide, averager = own.float(), BucketAverager(dist.group.WORLD)

    def native_mean(bucket: Tensor) -> None:
        bucket.div_(RANKS)
        dist.all_reduce(bucket)

    return {
        NATIVE: lambda: native_mean(own),
        "ours": lambda: averager(own, True, True).wait(),
        "native FP32": lambda: native_mean(wide),
    }


def timed(action: Action) -> tuple[float, float]:
    """Seconds from the moment all ranks have arrived until all are done, and the processor time of all of them."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    action()
    dist.barrier()
    passed = time.perf_counter() - start
    total = torch.tensor(time.process_time() - used, dtype=torch.float64)
    dist.all_reduce(total)
    return passed, float(total)


def compared(title: str, actions: dict[str, Action], rounds: int) -> list[dict[str, Any]]:
    """Time the actions in turn; returns quartiles of the ratios to the native one, in a row for each other."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for turn in range(rounds + 3):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            times[name].append(timed(actions[name]))
    rows = []
    for name in [name for name in actions if name != NATIVE]:
        pairs = [*zip(times[name], times[NATIVE], strict=True)][3:]  # buckets are built anew after the first step
        of_time, of_processor = (statistics.quantiles([a[k] / b[k] for a, b in pairs], n=4) for k in range(2))
        rows.append({"what": f"{title}, {name}", "time": of_time, "processor time": of_processor})
    return rows


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Run one process; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    rows = []
    for kind in ("DDP", "FSDP2"):
        steps = {way: training_step(kind, way, options) for way in (NATIVE, "ours")}
        rows += compared(kind, steps, options.rounds)
    rows += compared("a bucket", bucket_actions(), options.rounds)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(rows))
    # Without taking gloo down, which aborts now and then; all wait for each other first.
    dist.barrier()
    time.sleep(0.5)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("rounds", 32), ("tokens", 256), ("layers", 10), ("width", 384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (options, folder), nprocs=RANKS)  # type: ignore[attr-defined]
        rows = json.loads(Path(folder, "found.json").read_text())
    print("| | step time, ours / native | CPU time, ours / native |\n| --- | ---: | ---: |")
    for row in rows:
        cells = (f"{row[k][1]:.2f} ({row[k][0]:.2f} to {row[k][2]:.2f})" for k in ("time", "processor time"))
        print(f"| {row['what']} | {' | '.join(cells)} |")
    write_record(options.output, rows=rows)


if __name__ == "__main__":
    main()
