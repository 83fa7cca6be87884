"""Make and compare shards of tensors that every rank has in full, without sending anything."""

from collections.abc import Sequence

import torch
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
