"""Step time of two-rank training with FP32-accumulated gradients, relative to native BF16 reductions.

A Llama, cast to BF16, is trained by two processes on gloo, each with one thread: under DDP (default buckets) and under
FSDP2 (a group per layer, norms in FP32 as a group of their own), once with torch's own reduction and once with ours.
All four live in the same processes and take turns in blocks of a few steps, in an order that is reversed each round, so
that changes in the machine's speed affect all of them equally. Per round the mean step times of a pair give one ratio;
reported are the median and the quartiles of the ratios. A step is timed on rank 0 with and without the optimizer.
Processor time is that of all threads of both processes, gloo's included; it excludes waiting and other programs.

Then the reductions alone, on one bucket of 25 MB, where no computation hides their time; the parts of ours; and native
FP32, which moves twice the bytes.

    python benchmarks/reduction_overhead.py [--rounds 16] [--tokens 256] [--output benchmarks/results/…json]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec import AdamW, __version__, cast_model
from hf_lowprec.reduction import (
    BucketAverager,
    mean_in_rank_order,
    reduce_in_fp32,
    reduce_scatter_in_fp32,
    shard_fp32_parameters,
)
from hf_lowprec.reduction.fsdp2 import FP32ReduceScatter
from hf_lowprec.reduction.scratch_buffers import ScratchBuffers

RANKS = 2
BUCKET = 25 * 2**20
KINDS = ("DDP", "FSDP2")
AIM = 1.05
NATIVE = "native BF16"
WITHOUT, WITH, PROCESSOR = "forward and backward", "with the optimizer", "the same, processor time"


def llama(layers: int, width: int, vocabulary: int) -> nn.Module:
    """The same weights in every process, in BF16."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    cast_model(model)
    return model


class Watch:
    """Measures the time from the moment all ranks have arrived, and the processor time of all of them."""

    def __init__(self) -> None:
        dist.barrier()
        self.start, self.used = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        """Seconds until all are done."""
        dist.barrier()
        passed = time.perf_counter() - self.start
        used = torch.tensor(time.process_time() - self.used, dtype=torch.float64)
        dist.all_reduce(used)
        return passed, float(used)


class TrainingRun:
    """One model under `kind`, with our reduction or the native one."""

    def __init__(self, kind: str, ours: bool, model: nn.Module) -> None:
        self.times: dict[str, list[float]] = {WITHOUT: [], WITH: [], PROCESSOR: []}
        if kind == "DDP":
            self.model: nn.Module = DistributedDataParallel(model)
            if ours:
                reduce_in_fp32(self.model)
        else:
            mesh = init_device_mesh("cpu", (RANKS,))
            shard_fp32_parameters(model, mesh=mesh)
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
            if ours:
                reduce_scatter_in_fp32(self.model)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)

    def block(self, tokens: Tensor, steps: int) -> None:
        """Time some steps and keep their mean."""
        watch, reduced = Watch(), 0.0
        for _ in range(steps):
            start = time.perf_counter()
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            reduced += time.perf_counter() - start
            self.optimizer.step()
            self.optimizer.zero_grad()
        for series, total in zip(self.times.values(), (reduced, *watch.stop()), strict=True):
            series.append(total / steps)

    def forget(self) -> None:
        """Drop the times so far, after warming up."""
        for series in self.times.values():
            series.clear()


def ratios(ours: Sequence[float], native: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios, of times that were taken in turns."""
    low, middle, high = statistics.quantiles([o / n for o, n in zip(ours, native, strict=True)], n=4)
    return {"ratio": middle, "low": low, "high": high}


def steps(options: dict[str, int]) -> list[dict[str, Any]]:
    """Time training steps.

    Returns:
        The rows of the table.
    """
    rank = dist.get_rank()
    shape = options["layers"], options["width"], options["vocabulary"]
    runs = {(kind, ours): TrainingRun(kind, ours, llama(*shape)) for kind in KINDS for ours in (False, True)}
    length = min(options["tokens"], 128)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(shape[2], (options["tokens"] // length, length), generator=generator)
    for turn in range(options["rounds"] + 1):
        for run in list(runs.values())[:: 1 if turn % 2 else -1]:
            run.block(tokens, options["block"])
            if turn == 0:
                run.forget()  # buckets are built anew after the first step
    rows = []
    for kind in KINDS:
        for what in runs[kind, True].times:
            native, ours = (runs[kind, o].times[what] for o in (False, True))
            medians = {"native_ms": 1e3 * statistics.median(native), "ours_ms": 1e3 * statistics.median(ours)}
            rows.append({"kind": kind, "what": what, **medians, **ratios(ours, native)})
    return rows


def bucket_actions() -> dict[str, dict[str, Callable[[], object]]]:
    """The reductions of a bucket by group; within a group all are compared with the first."""
    group: Any = dist.group.WORLD
    own = torch.randn(BUCKET // 2, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    wide, received = own.float(), torch.empty_like(own)
    part, wide_part = own.new_empty(len(own) // RANKS), wide.new_empty(len(own) // RANKS)
    averager, reduce_scatter = BucketAverager(group), FP32ReduceScatter(torch.bfloat16, ScratchBuffers(), False)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed both
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    average = dist.ReduceOp.AVG

    def native_mean(bucket: Tensor) -> None:
        bucket.div_(RANKS)
        dist.all_reduce(bucket, group=group)

    return {
        "all-reduce (DDP)": {
            NATIVE: lambda: native_mean(own),
            "ours": lambda: averager(own, True, True).wait(),
            "native FP32, twice the bytes": lambda: native_mean(wide),
        },
        "reduce-scatter (FSDP2)": {
            NATIVE: lambda: scatter(part, own, op=average, group=group),
            "ours": lambda: reduce_scatter(part, own, group, average),
            "native FP32, twice the bytes": lambda: scatter(wide_part, wide, op=average, group=group),
        },
        "what ours consists of": {
            "all-to-all": lambda: dist.all_to_all_single(received, own, group=group),
            "mean in rank order": lambda: mean_in_rank_order(received.view(RANKS, -1), RANKS, part),
            "all-gather": lambda: gather(own, part, group=group),
        },
    }


def buckets(rounds: int) -> list[dict[str, Any]]:
    """Time the reductions alone.

    Returns:
        The rows of the table.
    """
    actions = bucket_actions()
    times: dict[tuple[str, str], list[tuple[float, float]]] = {
        (g, method): [] for g in actions for method in actions[g]
    }
    for turn in range(rounds + 2):
        for group, method in list(times)[:: 1 if turn % 2 else -1]:
            watch = Watch()
            actions[group][method]()
            times[group, method].append(watch.stop())
    rows = []
    for (group, method), series in times.items():
        passed, used = zip(*series[2:], strict=True)
        medians = {"ms": 1e3 * statistics.median(passed), "processor_ms": 1e3 * statistics.median(used)}
        row: dict[str, Any] = {"kind": group, "what": method, **medians}
        if NATIVE in actions[group] and method != NATIVE:
            native, native_used = zip(*times[group, NATIVE][2:], strict=True)
            row |= ratios(passed, native)
            row["processor_ratio"] = ratios(used, native_used)["ratio"]
        rows.append(row)
    return rows


def _rank(rank: int, options: dict[str, int], folder: str) -> None:
    """Run one process; rank 0 writes the results."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    found = {"steps": steps(options), "buckets": buckets(options["bucket_rounds"])}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    # Without taking gloo down, which aborts now and then; all wait for each other first.
    dist.barrier()
    time.sleep(0.5)
    os._exit(0)


def spread(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if "ratio" in row else ""


def tables(found: dict[str, list[dict[str, Any]]]) -> list[Table]:
    """Format the results as two tables."""
    by_step = Table(title="step time", title_justify="left")
    for heading in ("wrapped by", "what", "native ms", "ours ms", "ratio (quartiles)", f"≤ {AIM}"):
        by_step.add_column(heading, justify="left" if heading in ("wrapped by", "what") else "right")
    for row in found["steps"]:
        met = "yes" if row["ratio"] <= AIM else "no"
        times = f"{row['native_ms']:.1f}", f"{row['ours_ms']:.1f}"
        by_step.add_row(row["kind"], row["what"], *times, spread(row), met)
    by_bucket = Table(title=f"a bucket of {BUCKET >> 20} MiB alone", title_justify="left")
    for heading in ("reduction", "way", "ms", "ratio to native BF16 (quartiles)", "processor ms", "ratio"):
        by_bucket.add_column(heading, justify="left" if heading in ("reduction", "way") else "right")
    for row in found["buckets"]:
        ratio = f"{row['processor_ratio']:.2f}" if "processor_ratio" in row else ""
        times = f"{row['ms']:.1f}", spread(row), f"{row['processor_ms']:.1f}", ratio
        by_bucket.add_row(row["kind"], row["what"], *times)
    return [by_step, by_bucket]


def main(
    rounds: Annotated[int, typer.Option(help="How often each of the four takes its turn.")] = 16,
    block: Annotated[int, typer.Option(help="Steps in a turn.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens in a step of one process.")] = 256,
    layers: int = 10,
    width: Annotated[int, typer.Option(help="Of the hidden states, a multiple of 64.")] = 384,
    vocabulary: int = 8192,
    bucket_rounds: Annotated[int, typer.Option(help="How often a bucket is reduced.")] = 20,
    output: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Step time with FP32-accumulated gradients, relative to native BF16 reductions."""
    output = output or Path(f"benchmarks/results/reduction-overhead-{date.today()}.json")
    options = {"rounds": rounds, "block": block, "tokens": tokens, "bucket_rounds": bucket_rounds}
    options |= {"layers": layers, "width": width, "vocabulary": vocabulary}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (options, folder), nprocs=RANKS)  # type: ignore[attr-defined]
        found = json.loads(Path(folder, "found.json").read_text())
    load.append(os.getloadavg()[0])
    parameters = sum(param.numel() for param in llama(layers, width, vocabulary).parameters())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "hf_lowprec": __version__}
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {RANKS} processes with 1 thread each, gloo",
        "versions": {**versions, "python": platform.python_version()},
        "options": {**options, "parameters": parameters},
        "load_before_and_after": load,  # about two after a run on a machine that does nothing else
        **found,
    }
    console = Console(width=120)
    size = f"{parameters / 1e6:.1f} M parameters, {tokens} tokens per process and step"
    console.print(f"{size}; load of the machine {load[0]:.1f} before, {load[1]:.1f} after (2 are our own)")
    console.print(*tables(found), sep="\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    console.print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
