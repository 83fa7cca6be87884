"""Does a candidate give a tensor the same bits when its rows are sharded over ranks, as FSDP2 shards them?

Each rank steps the whole tensor and, as a DTensor, its own rows of it, with the same gradients and the same seed of
torch's generator, and compares the rows and their masters. No communication is needed, but the ranks are real ones.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from peers import optimizers
from peers.candidates import CANDIDATES, Candidate

STEPS = 5
RANKS = (2, 3)
SHAPES = ((40, 576), (37, 512), (37, 100))
"""Rows of 2.25, 2 and 0.4 blocks of 256; the last ones are no multiple of 32 either. 40 rows are uneven for 3 ranks."""
EQUAL, DIFFERENT = "equal", "different"


def sharding_verdicts(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """For each number of ranks and shape: "equal" if all ranks have the same bits, "different", or an error."""
    found: dict[str, list[str]] = {candidate.name: [] for candidate in candidates}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, [candidate.name for candidate in candidates], folder)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[attr-defined]
            by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        for name, verdicts in found.items():
            verdicts += map(of_all_ranks, zip(*(rank[name] for rank in by_rank), strict=True))
    return found


def of_all_ranks(verdicts: Sequence[str]) -> str:
    """Different bits on one rank count before an error on another."""
    if DIFFERENT in verdicts:
        return DIFFERENT
    return next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)


def summary(verdicts: Sequence[str]) -> str:
    """Of all cases: "yes", or what is not equal."""
    different, equal = verdicts.count(DIFFERENT), verdicts.count(EQUAL)
    errors = sorted({verdict.split(":")[0] for verdict in verdicts if verdict not in (EQUAL, DIFFERENT)})
    parts = [f"{different} of {len(verdicts)} differ"] * (different > 0)
    parts += [f"{len(verdicts) - equal - different} of {len(verdicts)} raise {', '.join(errors)}"] * bool(errors)
    return "; ".join(parts) or "yes"


def _rank(rank: int, ranks: int, names: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    optimizers.run_uncompiled()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    chosen = [candidate for candidate in CANDIDATES if candidate.name in names]
    found = {candidate.name: [compare(candidate, shape, mesh) for shape in SHAPES] for candidate in chosen}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    # Without taking gloo down, which aborts now and then; all wait for each other first.
    dist.barrier()
    time.sleep(0.5)
    os._exit(0)


def compare(candidate: Candidate, shape: tuple[int, int], mesh: DeviceMesh) -> str:
    """ "equal", "different" or the error of this rank's rows of a tensor."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).mul_(0.02).to(candidate.dtype)
    grads = [torch.randn(shape, generator=generator).to(candidate.dtype) for _ in range(STEPS)]
    whole = _train(candidate, weight, grads)
    try:
        mine = _train(candidate, _sharded(weight, mesh), [_sharded(grad, mesh) for grad in grads])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    rows = [tensor.chunk(mesh.size())[mesh.get_local_rank()] for tensor in whole]
    return EQUAL if all(map(torch.equal, rows, mine)) else DIFFERENT


def _train(candidate: Candidate, weight: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
    """The weight and its master after all steps; of a DTensor, this rank's rows."""
    param = Parameter(weight.clone())
    optimizer = candidate.build([param], lr=1e-3, **candidate.exact_start)
    torch.manual_seed(0)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (param.detach(), *candidate.masters(optimizer, [param]))
    ]


def _sharded(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    local = tensor.chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
