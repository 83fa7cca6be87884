"""The ranks that share matrices, and the messages between them: shards within a replica, results between replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.optim.sharding import Replicas, Sharding


@dataclass(frozen=True)
class Peers:
    """This rank and those whose coordinates in a mesh differ only in certain dimensions, or the ranks of a group.

    Attributes:
        ranks: their global ranks.
        coordinates: each rank's coordinates in the mesh, or its rank in the group.
        own: this rank's position among them.
        group: a process group that contains them.
    """

    ranks: Sequence[int] = (0,)
    coordinates: Sequence[tuple[int, ...]] = ((),)
    own: int = 0
    group: Any = None

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class SharingRanks:
    """The ranks that share matrices with this one.

    Attributes:
        device: the device of the shards.
        shards: the ranks of this replica, which together have all shards.
        replicas: the ranks with the same shards, one in each replica.
    """

    device: torch.device
    shards: Peers = Peers()
    replicas: Peers = Peers()

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]]
    ) -> Callable[[], list[list[Tensor]]]:
        """Send tensors to the ranks of this replica and receive others, in one message to and from each.

        Args:
            outgoing: the tensors for each rank.
            incoming: the numbers of elements of the tensors from each rank.

        Returns:
            A function that waits, and returns the tensors received from each rank, flat.
        """
        empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=self.device)
        flat = [[tensor.view(-1) for tensor in tensors] or [empty(0)] for tensors in outgoing]
        sent = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in flat]
        own = self.shards.own
        received = [sent[own] if peer == own else empty(sum(each)) for peer, each in enumerate(incoming)]
        operations = [
            dist.P2POp(operation, buffer, self.shards.ranks[peer], self.shards.group)
            for operation, buffers in ((dist.isend, sent), (dist.irecv, received))
            for peer, buffer in enumerate(buffers)
            if peer != own and buffer.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[list[Tensor]]:
            for work in works:
                work.wait()
            sent.clear()  # they may be read until here
            return [list(buffer.split(lengths)) for buffer, lengths in zip(received, incoming, strict=True)]

        return wait

    def broadcast(self, memory: Tensor, replica: int) -> None:
        """Copy one replica's `memory` to all replicas: each rank receives from the rank with the same shards."""
        if len(self.replicas) > 1 and memory.numel():
            dist.broadcast(memory, self.replicas.ranks[replica], group=self.replicas.group)


def ranks_that_share(
    shared: Sharding | Replicas | dist.ProcessGroup | None, device: torch.device, without_replicas: bool
) -> SharingRanks:
    """Return the ranks that share matrices.

    Args:
        shared: how the matrices are sharded; or the ranks that have the same plain tensors, or parts of the same
            flattened parameters; or None.
        device: the device of the shards.
        without_replicas: whether each replica orthogonalizes all matrices.
    """
    shards = replicas = Peers()
    if isinstance(shared, Sharding):
        mesh, dims = shared.mesh, shared.mesh_dims
        # Replicas along other dimensions do the same work.
        copied = tuple(dim for dim in range(mesh.ndim) if dim not in dims)[:1]
        shards, replicas = _peers_in_mesh(mesh, dims), _peers_in_mesh(mesh, copied)
    elif isinstance(shared, Replicas):
        replicas = _peers_in_group(shared.group)
    elif shared is not None:
        shards = _peers_in_group(shared)
    return SharingRanks(device, shards, Peers() if without_replicas else replicas)


def _peers_in_group(group: dist.ProcessGroup) -> Peers:
    ranks = dist.get_process_group_ranks(group)
    return Peers(ranks, [(rank,) for rank in range(len(ranks))], group.rank(), group)


def _peers_in_mesh(mesh: Any, dims: tuple[int, ...]) -> Peers:
    """Return the ranks whose coordinates differ from this one's only in the dimensions `dims` of `mesh`."""
    own = tuple(mesh.get_coordinate())
    coordinates = list(product(*(range(n) if dim in dims else (own[dim],) for dim, n in enumerate(mesh.shape))))
    ranks = [int(mesh.mesh[each]) for each in coordinates]
    # Messages between two ranks need no group of their own.
    group = mesh.get_group(dims[0]) if len(dims) == 1 else dist.group.WORLD
    return Peers(ranks, coordinates, coordinates.index(own), group)
