"""Error of the mean of BF16 gradients over N ranks: BF16 sums, FP32 sums on the wire, and ours.

Real processes on gloo for few ranks, and the same additions in one process for many. Gradients are normal noise, one
per rank, plus a common signal whose standard deviation is 0 or 1 times that of the noise; all are rounded to BF16, and
the rounded values are averaged. With the exact mean m (FP64) and a result x, errors are

    relative: ‖x − m‖ / ‖m‖            mean, max: |x − m| of the elements, by the root mean square of m

N is a power of two, so dividing is exact wherever it is done. Ours is in the table twice: the FP32 sum, and the
BF16 result after the one rounding at the end. No BF16 result is better than the exact mean rounded to BF16, the
table's floor: about 1.6e-3, which is 2⁻⁷/√12 by the root mean square of a significand. So BF16 results are to be
compared with the floor, and FP32 results with each other. The growth is the exponent of N in the power law that fits
best; FP32's is above that of its law, because sums of few BF16 values are exact in FP32.

    python benchmarks/reduction_error.py [--signals 0,1] [--elements 16384] [--output benchmarks/results/…json]
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_lowprec import __version__
from hf_lowprec.reduction import BucketAverager, mean_in_rank_order
from hf_lowprec.reduction.fsdp2 import FP32ReduceScatter
from hf_lowprec.reduction.scratch_buffers import ScratchBuffers

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Errors = dict[str, dict[int, dict[str, float]]]
"""Errors by method and number of ranks."""

OURS, OURS_FP32 = "ours", "ours, before the rounding to BF16"
FLOOR = "the exact mean, rounded to BF16 (floor)"

CIRCULATED = {
    "16-bit sums, circulated": {8: 1e-5, 64: 8e-5, 512: 6e-4},
    "FP32 sums, circulated": {8: 1e-7, 64: 8e-7, 512: 6e-6},
}
"""From a third party's description of Megatron-LM's reduce-scatter with FP32 accumulation."""
ABOUT_CIRCULATED = """\
The circulated figures come from a third party's description of Megatron-LM's reduce-scatter with FP32 accumulation,
which gives them for FP16 and does not say what was measured, or relative to what. None were found in NVIDIA's code or
in the description of its pull request #1967. Their size is not comparable: a 16-bit result, rounded once, is off by
more than 1e-5 (see the floor; FP16's is an eighth of it). Comparable are the growth with N and the ratio of the two
rows. Growth as N is what a strong common signal gives (--signals 10), √N is what noise gives. The ratio is 100 there,
where one rounding to BF16 is 2¹⁶ times one to FP32 (FP16: 2¹³)."""


def gradient(rank: int, elements: int, signal: float, seed: int) -> Tensor:
    """The gradient of `rank`."""
    common = torch.randn(elements, generator=torch.Generator().manual_seed(1_000_000 * (seed + 1)))
    noise = torch.randn(elements, generator=torch.Generator().manual_seed(1_000_000 * (seed + 1) + 1 + rank))
    return noise.add_(common, alpha=signal).to(BF16)


def gradients(ranks: int, elements: int, signal: float, seed: int) -> Tensor:
    """The gradients of all ranks, of shape (ranks, elements)."""
    return torch.stack([gradient(rank, elements, signal, seed) for rank in range(ranks)])


def add_rounded(one: Tensor, other: Tensor) -> Tensor:
    """The sum, rounded to the tensors' dtype."""
    return (one.float() + other.float()).to(one.dtype)


def ring(versions: Tensor) -> Tensor:
    """The sum as a ring's reduce-scatter adds it up: chunk c starts at rank c + 1 and ends at rank c.

    It is rounded at each hop, because what travels has the gradients' dtype.
    """
    ranks = len(versions)
    chunks = versions.view(ranks, ranks, -1)
    chunk = torch.arange(ranks)
    total = chunks[(chunk + 1) % ranks, chunk]
    for hop in range(2, ranks + 1):
        total = add_rounded(total, chunks[(chunk + hop) % ranks, chunk])
    return total.view(-1)


def tree(versions: Tensor) -> Tensor:
    """The sum in a binary tree over a power of two of ranks, rounding at each node."""
    while len(versions) > 1:
        versions = add_rounded(versions[0::2], versions[1::2])
    return versions[0]


def ours(versions: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean as this package computes it, rounded to `dtype` once."""
    return mean_in_rank_order(versions, len(versions), torch.empty(versions.shape[1], dtype=dtype))


def exact_mean(versions: Tensor) -> Tensor:
    """In FP64, which holds sums of BF16 values of similar size without rounding."""
    return versions.sum(dim=0, dtype=FP64) / len(versions)


def simulated(versions: Tensor) -> dict[str, Tensor]:
    """Compute the means by method, with all ranks simulated in this process."""
    ranks = len(versions)
    return {
        "BF16 ring": ring(versions).double() / ranks,
        "BF16 tree": tree(versions).double() / ranks,
        "FP32 ring (twice the bytes)": ring(versions.float()).double() / ranks,
        OURS_FP32: ours(versions, FP32),
        OURS: ours(versions, BF16),
        FLOOR: exact_mean(versions).to(BF16),
    }


def real(own: Tensor, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Compute the means by method over the processes of `group`, all of which call this with their own gradient."""
    ranks = group.size()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it

    def whole(part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts)

    def reduced(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=group)
        return gradient.double() / ranks

    part = torch.empty(own.numel() // ranks, dtype=BF16)
    scatter(part, own.clone(), group=group)
    fp32_part = torch.empty(part.shape, dtype=FP32)
    FP32ReduceScatter(BF16, ScratchBuffers(), False)(fp32_part, own.float(), group, dist.ReduceOp.AVG)
    mean = own.clone()
    BucketAverager(group)(mean, True, True).wait()
    return {
        "BF16 all-reduce": reduced(own.clone()),
        "BF16 reduce-scatter": whole(part).double() / ranks,
        "FP32 all-reduce (twice the bytes)": reduced(own.float()),
        OURS_FP32: whole(fp32_part),
        OURS: mean,
    }


def error(mean: Tensor, exact: Tensor) -> dict[str, float]:
    """The errors that the module's docstring defines."""
    difference, size = mean.double() - exact, float(exact.square().mean().sqrt())
    return {
        "relative": float(difference.norm() / exact.norm()),
        "mean": float(difference.abs().mean()) / size,
        "max": float(difference.abs().max()) / size,
    }


def _rank(rank: int, sizes: list[int], signals: list[float], elements: int, seed: int, folder: str) -> None:
    """Run one real process; rank 0 writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=max(sizes))
    found: dict[float, Errors] = {}
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    for signal in signals:
        found[signal] = defaultdict(dict)
        for size, group in groups.items():
            if rank >= size:
                continue
            means = real(gradient(rank, elements, signal, seed), group)
            if rank:
                continue
            versions = gradients(size, elements, signal, seed)
            if not torch.equal(means[OURS], ours(versions, BF16)):
                raise RuntimeError(f"over {size} processes ours is not the mean in rank order")
            for method, mean in means.items():
                found[signal][method][size] = error(mean, exact_mean(versions))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(list(found.values())))
    # Without taking gloo down, which aborts now and then; all wait for each other first.
    dist.barrier()
    time.sleep(0.5)
    os._exit(0)


def over_processes(sizes: list[int], signals: list[float], elements: int, seed: int) -> list[Errors]:
    """Measure errors by signal, over groups of as many real processes as `sizes` says."""
    if not sizes:
        return [{} for _ in signals]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (sizes, signals, elements, seed, folder)
        # Forked, which saves the imports: nothing has been computed yet, so there are no threads that would be missing.
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=max(sizes), start_method="fork")  # type: ignore[attr-defined]
        by_signal = json.loads(Path(folder, "found.json").read_text())
    return [
        {method: {int(size): value for size, value in row.items()} for method, row in errors.items()}
        for errors in by_signal
    ]


def in_one_process(sizes: list[int], signal: float, elements: int, seed: int) -> Errors:
    """Errors of the simulated reductions."""
    versions = gradients(max(sizes), elements, signal, seed)
    found: Errors = defaultdict(dict)
    for size in sizes:
        exact = exact_mean(versions[:size])
        for method, mean in simulated(versions[:size]).items():
            found[method][size] = error(mean, exact)
    return found


def growth(row: dict[int, dict[str, float]]) -> float | None:
    """The exponent of N of the law that fits the relative errors best; those that are zero are left out."""
    logs = [(math.log(size), math.log(found["relative"])) for size, found in row.items() if found["relative"] > 0]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope if len(logs) > 1 else None


def table(title: str, sections: dict[str, Errors], sizes: list[int]) -> Table:
    """Format relative errors by N, their growth, and the errors of single elements at the largest N."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("relative error of the mean")
    for heading in (*(f"N = {size}" for size in sizes), "growth", "mean, max element"):
        shown.add_column(heading, justify="right")
    for where, errors in sections.items():
        for method, row in errors.items():
            last = row[max(row)]
            single = f"{last['mean']:.1e}, {last['max']:.1e}" if "mean" in last else ""
            cells = (f"{row[size]['relative']:.2e}" if size in row else "" for size in sizes)
            exponent = growth(row)
            law = "" if exponent is None else f"N^{exponent:.2f}"
            shown.add_row(f"{method}, {where}" if where else method, *cells, law, single)
        shown.add_section()
    return shown


def _numbers(text: str, kind: Any) -> list[Any]:
    return [kind(number) for number in text.split(",") if number]


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of simulated ranks, powers of two.")] = "2,4,8,64,512",
    processes: Annotated[str, typer.Option(help="Numbers of real processes, powers of two.")] = "2,4,8",
    signals: Annotated[str, typer.Option(help="Sizes of the common signal, by that of the noise.")] = "0,1",
    elements: Annotated[int, typer.Option(help="Elements of a gradient, a multiple of all numbers of ranks.")] = 16384,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Error of the mean of BF16 gradients over N ranks."""
    torch.set_num_threads(1)
    sizes, real_sizes, strengths = _numbers(ranks, int), _numbers(processes, int), _numbers(signals, float)
    if not sizes or any(size < 2 or size & (size - 1) or elements % size for size in [*sizes, *real_sizes]):
        raise typer.BadParameter("numbers of ranks are powers of two, 2 or more, that divide --elements")
    output = output or Path(f"benchmarks/results/reduction-error-{date.today()}.json")
    console = Console(width=140)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, 1 thread per process, gloo",
        "versions": {"torch": torch.__version__, "hf_lowprec": __version__, "python": platform.python_version()},
        "options": {"elements": elements, "seed": seed},
        "signals": {},
        "circulated": {"figures": CIRCULATED, "about": ABOUT_CIRCULATED},
    }
    circulated: Errors = {
        method: {n: {"relative": value} for n, value in row.items()} for method, row in CIRCULATED.items()
    }
    for signal, measured in zip(strengths, over_processes(real_sizes, strengths, elements, seed), strict=True):
        errors = {"gloo": measured, "simulated": in_one_process(sizes, signal, elements, seed)}
        console.print(table(f"signal {signal:g} × noise", {**errors, "": circulated}, sorted({*sizes, *real_sizes})))
        result["signals"][f"{signal:g}"] = {
            where: [{"way": method, "growth": growth(row), "errors": row} for method, row in found.items()]
            for where, found in errors.items()
        }
    console.print(ABOUT_CIRCULATED)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    console.print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
