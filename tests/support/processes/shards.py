"""Shards of tensors that every rank has in full, full tensors of shards, and what all ranks have."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


def shard(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of which `full`, the same on all ranks, is the full tensor; shares no memory with it."""
    local = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local().clone()
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())


def has_shard_of(part: Tensor, full: Tensor) -> bool:
    """Compare this rank's shard with what it should be of `full`; a tensor that is no DTensor, with all of it."""
    if not isinstance(part, DTensor):
        return torch.equal(part, full)
    expected = shard(full, part.device_mesh, part.placements)
    return part.shape == full.shape and torch.equal(part.to_local(), expected.to_local())


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; others as they are. gloo knows no int16, so those are sent as int32."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.int().full_tensor().to(torch.int16) if tensor.dtype == torch.int16 else tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of_every_rank(value: Any) -> list[Any]:
    """What each rank has called this with."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(params: Iterable[Tensor], optimizer: torch.optim.Optimizer, of: Callable = gathered) -> str:
    """Of every parameter and every state, whole ones, or this rank's shards with `of=local`."""
    total = hashlib.sha256()
    for param in params:
        for tensor in (param, *optimizer.state[param].values()):
            held = of(tensor)
            total.update(str(held.dtype).encode())
            total.update(held.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
