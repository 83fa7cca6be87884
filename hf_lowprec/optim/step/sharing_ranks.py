"""The ranks that share matrices, and the messages between them: shards within a replica, results between replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.optim.sharding import Replicas, Sharding

_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Groups of the ranks of meshes with several sharded dimensions, by the default group."""


class _Broadcast(NamedTuple):
    """One of the broadcasts by which all replicas get what one of them has: over a dimension of the replicas.

    Attributes:
        group: this rank and those that differ from it in that dimension alone.
        ranks: its global ranks, by their place in that dimension.
    """

    group: Any
    ranks: list[int]


@dataclass(frozen=True)
class SharingRanks:
    """The ranks that share matrices, as this one sees them.

    Attributes:
        device: of the shards.
        ranks: the global ranks of this replica.
        coordinates: of each of them, for `shard_layout`.
        own: this rank's position among them.
        group: their process group.
        replicas: the coordinates of the replicas.
        replica: this rank's position among them.
        broadcasts: over the dimensions of the replicas.
    """

    device: torch.device
    ranks: Sequence[int] = (0,)
    coordinates: Sequence[tuple[int, ...]] = ((),)
    own: int = 0
    group: Any = None
    replicas: Sequence[tuple[int, ...]] = ((),)
    replica: int = 0
    broadcasts: Sequence[_Broadcast] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of ranks of a replica."""
        return len(self.ranks)

    def exchange(
        self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[torch.Size]]
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Send tensors to ranks of this replica and receive others of known shapes, in one message to or from each.

        Returns:
            A function that waits, and returns the tensors received from each rank that has sent some, flat.
        """
        flat = {peer: [each.view(-1) for each in tensors] for peer, tensors in outgoing.items() if tensors}
        sent = {peer: parts[0] if len(parts) == 1 else torch.cat(parts) for peer, parts in flat.items()}
        sizes = {peer: [shape.numel() for shape in shapes] for peer, shapes in incoming.items() if shapes}
        empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=self.device)
        received = {peer: sent[peer] if peer == self.own else empty(sum(each)) for peer, each in sizes.items()}
        operations = [
            dist.P2POp(operation, buffer, self.ranks[peer], self.group)
            for operation, buffers in ((dist.isend, sent), (dist.irecv, received))
            for peer, buffer in buffers.items()
            if peer != self.own and buffer.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> dict[int, list[Tensor]]:
            for work in works:
                work.wait()
            sent.clear()  # until here, they are being read
            return {peer: list(received[peer].split(lengths)) for peer, lengths in sizes.items()}

        return wait

    def broadcast(self, memory: Tensor, replica: int) -> None:
        """Give all replicas the `memory` of one of them: each rank gets that of the rank with the same shards."""
        source, own = self.replicas[replica], self.replicas[self.replica]
        for dim, (group, ranks) in enumerate(self.broadcasts):
            if own[dim + 1 :] == source[dim + 1 :] and memory.numel():
                dist.broadcast(memory, ranks[source[dim]], group=group)


def ranks_that_share(shared: Sharding | Replicas | dist.ProcessGroup | None, device: torch.device) -> SharingRanks:
    """The ranks that share matrices.

    Args:
        shared: how the matrices are sharded; or the ranks that have the same plain tensors, or parts of the same
            flattened parameters; or None.
        device: of the shards.
    """
    if isinstance(shared, Sharding):
        return _ranks_of_mesh(shared, device)
    if shared is None:
        return SharingRanks(device)
    group = shared.group if isinstance(shared, Replicas) else shared
    ranks, places, own = dist.get_process_group_ranks(group), [(k,) for k in range(group.size())], group.rank()
    if shared is group:
        return SharingRanks(device, ranks, places, own, group)
    return SharingRanks(device, [ranks[own]], replicas=places, replica=own, broadcasts=[_Broadcast(group, ranks)])


def _ranks_of_mesh(sharding: Sharding, device: torch.device) -> SharingRanks:
    mesh, sizes = sharding.mesh, sharding.mesh.shape
    own = mesh.get_coordinate()
    assert own is not None
    copied = [dim for dim in range(mesh.ndim) if dim not in sharding.mesh_dims]
    every = product(*map(range, sizes))
    coordinates = [each for each in every if all(each[dim] == own[dim] for dim in copied)]
    ranks = [int(mesh.mesh[each]) for each in coordinates]
    replicas = list(product(*(range(sizes[dim]) for dim in copied)))
    lines = [[(*own[:dim], place, *own[dim + 1 :]) for place in range(sizes[dim])] for dim in copied]
    return SharingRanks(
        device,
        ranks,
        coordinates,
        coordinates.index(tuple(own)),
        _group_of(sharding, ranks),
        replicas,
        replicas.index(tuple(own[dim] for dim in copied)),
        [
            _Broadcast(mesh.get_group(dim), [int(mesh.mesh[each]) for each in line])
            for dim, line in zip(copied, lines, strict=True)
        ],
    )


def _group_of(sharding: Sharding, ranks: list[int]) -> Any:
    """The process group of the ranks that have all shards between them."""
    if len(sharding.mesh_dims) == 1:
        return sharding.mesh.get_group(sharding.mesh_dims[0])
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if tuple(ranks) not in groups:
        groups[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return groups[tuple(ranks)]
