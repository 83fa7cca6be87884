"""Host time of one optimizer step per tensor, for tensors of 16 elements, so that computing takes almost no time.

Gradients are those of a backward pass, so they are new tensors in every step. `FSDP2` and `HSDP` are a model that
`fully_shard` has sharded over one rank. `native` is the whole step on a CPU. `triton` is the step without the launch of
its kernels and without the upload of its tables, which need a GPU (`make bench-gpu` measures these): checking what has
changed, scalars, and the tables on the host. `clipped` includes `clip_grad_norm_`.

Times are the thread's CPU time, which other programs disturb less. All cases take turns.

    OMP_NUM_THREADS=1 python -m benchmarks.host_time [--tensors 146 291] [--rounds 60] [--output FILE.json]
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.record import write_record
from hf_lowprec import AdamW
from hf_lowprec.optim.backends.triton import handwritten_kernels

STEPS = 5
"""Steps of a case in each round."""


class Case(NamedTuple):
    """A model to step: `sharding` is "plain", "FSDP2" or "HSDP", `backend` "native" or "triton"."""

    sharding: str
    backend: str
    clipped: bool

    def __str__(self) -> str:
        return f"{self.sharding}, {self.backend}" + (", clipped" if self.clipped else "")


CASES = [
    *(Case(sharding, "native", False) for sharding in ("plain", "FSDP2", "HSDP")),
    *(Case(sharding, "native", True) for sharding in ("plain", "FSDP2")),
    *(Case(sharding, "triton", clipped) for clipped in (False, True) for sharding in ("plain", "FSDP2")),
]


class _NoLaunch:
    """Takes the place of a Triton function, and does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *tables, **constants: None

    def warmup(self, *tables: Any, **options: Any) -> None: ...


def measured_step(case: Case, tensors: int) -> Callable[[], float]:
    """A function that takes a step on `tensors` parameters and returns its CPU time in seconds."""

    class Sum(nn.Module):
        """A loss that uses every parameter once."""

        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList(torch.randn(16).bfloat16() for _ in range(tensors))

        def forward(self) -> torch.Tensor:
            return sum(value.sum() for value in self.values)

    model = Sum()
    if case.sharding != "plain":
        shape, names = ((1,), ("shard",)) if case.sharding == "FSDP2" else ((1, 1), ("replicate", "shard"))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = AdamW(model.parameters(), rounding="kahan", backend=case.backend)  # as recorded

    def take_step() -> float:
        model().backward()
        start = time.thread_time()
        if case.clipped:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        taken = time.thread_time() - start
        optimizer.zero_grad()
        return taken

    if case.backend == "triton":
        handwritten_kernels.square_sum = _NoLaunch()
        model().backward()
        with optimizer.plan_step() as plan:
            steps = [*plan.backend_steps]
        if case.clipped:  # a step that clips has kernels of its own
            with optimizer._plan_with_gradients(1.0) as plan:
                steps += plan.backend_steps
        for step in steps:
            step.step_kernel = step.ragged_kernel = _NoLaunch()
    return take_step


def measure(tensors: int, rounds: int) -> dict[str, float]:
    """Median CPU time of a step in milliseconds, by case."""
    steps = {str(case): measured_step(case, tensors) for case in CASES}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            taken = [step() for _ in range(STEPS)]
            times[name] += taken if turn else []  # the first round warms up
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[146, 291])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {tensors: measure(tensors, options.rounds) for tensors in options.tensors}
        dist.destroy_process_group()
    print(f"ms per step (µs per tensor)\n\n| case | {' | '.join(f'{tensors} tensors' for tensors in results)} |")
    print(f"|---|{'---:|' * len(results)}")
    for case in map(str, CASES):
        cells = (f"{found[case]:.3f} ({1e3 * found[case] / tensors:.2f})" for tensors, found in results.items())
        print(f"| {case} | {' | '.join(cells)} |")
    write_record(options.output, ms_per_step=results)


if __name__ == "__main__":
    main()
