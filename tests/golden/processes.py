"""Training through accelerate: in one process, on two and three ranks under DDP and FSDP2, and by Trainer.

    processes.py FILE RUN...

Without Trainer, every optimizer step has four micro-batches, and `Accelerator.clip_grad_norm_` clips it. FILE gets the
digests as JSON. It is a program of its own, since accelerate keeps its state in the process; ranks are forked from it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import hf_lowprec
from tests.golden import trainer
from tests.golden.exact import digest
from tests.golden.models import MICRO_BATCHES, Scales, digests
from tests.golden.recording import runs_of
from tests.golden.steps import ALGORITHMS, OPTIONS
from tests.support.processes.fork_ranks import fork_ranks
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave
from tests.support.processes.shards import gathered

STEPS = 4
WRAPPERS = {"one process": Scales, "DDP": DistributedDataParallel, "FSDP2": FSDPModule}
KINDS = {
    "one process": 1,
    "DDP, two ranks": 2,
    "FSDP2, two ranks": 2,
    "DDP, three ranks": 3,  # half of a rounded sum is exact, a third is not
    "FSDP2, three ranks": 3,
    "Trainer": 1,
}
"""Kinds of training, and their numbers of processes."""


def train(kind: str, algorithm: str, mode: str, accumulation: str) -> dict[str, str]:
    """Digests of gradients' norms, weights and states after four steps."""
    wrapper = kind.partition(",")[0]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if wrapper == "FSDP2" else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, fsdp_plugin=plugin)
    hf_lowprec.prepare_accelerator(accelerator, grad_accumulation=accumulation)
    model = Scales()
    hf_lowprec.cast_model(model)
    options = dict(OPTIONS[algorithm][0])
    if algorithm == "Muon":
        options["matrices"] = [param for param in model.parameters() if param.ndim in (2, 3)]
    options |= {"lr": 2.0**-9, "rounding": mode}
    optimizer = ALGORITHMS[algorithm](model.parameters(), **options)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    assert isinstance(prepared, WRAPPERS[wrapper]), type(prepared)
    norms, gradients = [], []
    for step in range(1, STEPS + 1):
        for micro_batch in range(MICRO_BATCHES):
            with accelerator.accumulate(prepared):
                model.give_factors(algorithm == "Muon", step, micro_batch, accelerator.process_index)
                accelerator.backward(prepared(torch.zeros((), requires_grad=True)).float().sum())
                if accelerator.sync_gradients:
                    if accelerator.num_processes < 3:  # of thirds, squares do not have exact sums
                        norms.append(gathered(accelerator.clip_grad_norm_(prepared.parameters(), 0.5)))
                    gradients += [gathered(layer.weight.grad).clone() for layer in model.layers]
                wrapped.step()
                wrapped.zero_grad()
    trained = digests(accelerator.unwrap_model(prepared), wrapped.optimizer)
    return {"norms": digest(norms), "gradients": digest(gradients), **trained}


def record(kind: str, runs: list[str]) -> dict[str, Any]:
    """Digests of algorithms and modes, and of AdamW with each way to add micro-batches up."""
    found: dict[str, Any] = {}
    for algorithm, mode in map(str.split, runs):
        accumulations = ["nearest", "fp32"] if (algorithm, mode) == ("AdamW", "kahan") else ["fp32"]
        found[f"{algorithm} {mode}"] = {
            f"grad_accumulation={accumulation}": train(kind, algorithm, mode, accumulation)
            for accumulation in accumulations
        }
    return found


def act(kind: str, rank: int, *, port: int, file: Path, runs: list[str]) -> None:
    """One rank, or the one process: its environment is what `torchrun` would give it."""
    if KINDS[kind] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": KINDS[kind], "LOCAL_WORLD_SIZE": KINDS[kind]}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in place.items()})
    if kind == "Trainer":
        found = trainer.record(file.parent, runs)
    else:
        allow_fsdp_on_cpu()
        found = record(kind, runs)
    if rank == 0:
        file.write_text(json.dumps(found))
    leave()


def main(file: Path, runs: list[str]) -> None:
    found = {}
    for kind, ranks in KINDS.items():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "digests.json")
            failure = fork_ranks(partial(act, kind, port=store.port, file=part, runs=runs_of(kind, runs)), ranks)
            if failure is not None:
                sys.exit(f"{kind}: {failure}")
            found[kind] = json.loads(part.read_text())
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
