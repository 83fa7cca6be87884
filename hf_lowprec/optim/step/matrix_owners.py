"""Which rank orthogonalizes which matrix, if ranks hold shards or copies of them, and the messages between ranks.

Every matrix has one owner, which gets the shards of the matrix, computes what a single process computes, and sends each
rank the shard of the result. Under DDP, each rank has the whole matrix; with hybrid sharding, some ranks have the same
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.optim.sharding import Sharding, ShardLayout, local_shard, replicas_of, shard_layout, sharding_of


class MatrixOwners:
    """The ranks that own matrices. They are counted from 0, in the order of the mesh or group.

    Attributes:
        count: how many ranks there are.

    Args:
        matrices: DTensors that are sharded over the same dimensions of the same mesh, or plain tensors.
        over: the sharding, or the group of ranks that have the plain tensors.
    """

    def __init__(self, matrices: Sequence[Any], over: Sharding | dist.ProcessGroup) -> None:
        self._matrices, self._device = matrices, local_shard(matrices[0]).device
        if isinstance(over, Sharding):
            mesh = over.mesh
            self._group = mesh.get_group() if mesh.ndim == 1 else None  # any two ranks are in the default group
            self._ranks: list[int] = mesh.mesh.flatten().tolist()
            self._coordinates = list(product(*map(range, mesh.shape)))
            copies = [[c for dim, c in enumerate(each) if dim not in over.mesh_dims] for each in self._coordinates]
        else:
            self._group, self._ranks = over, dist.get_process_group_ranks(over)
            self._coordinates = [(rank,) for rank in self._ranks]
            copies = [[rank] for rank in self._ranks]
        self.count, self._own = len(self._ranks), self._ranks.index(dist.get_rank())
        self._with_same_copy = [peer for peer, each in enumerate(copies) if each == copies[self._own]]
        self._layouts: dict[Any, list[ShardLayout]] = {}

    def gather(self, owners: Sequence[int], shards: Mapping[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's `shards`, given by the positions of the matrices, to the owners.

        Returns:
            A function that waits, and returns the whole matrices that this rank owns.
        """
        own = [k for k in shards if owners[k] == self._own]
        layouts = {peer: [self._layout(k, peer) for k in own] for peer in self._with_same_copy}
        sent = {peer: [shard for k, shard in shards.items() if owners[k] == peer] for peer in self._with_same_copy}
        wait = self._exchange(sent, {peer: [each.shape for each in held] for peer, held in layouts.items()})

        def matrices() -> dict[int, Tensor]:
            received = wait()
            found = {k: shards[k].new_empty(self._matrices[k].shape) for k in own}
            for peer, held in layouts.items():
                for k, layout, shard in zip(own, held, received[peer], strict=True):
                    layout.paste(shard, found[k])
            return found

        return matrices

    def scatter(self, owners: Sequence[int], results: Mapping[int, Tensor], shards: Mapping[int, Tensor]) -> None:
        """Overwrite the `shards` of matrices by those of the owners' `results`."""
        everyone = range(self.count)
        cut = {peer: [self._layout(k, peer).cut(result) for k, result in results.items()] for peer in everyone}
        expected = {peer: [k for k in shards if owners[k] == peer] for peer in everyone}
        wait = self._exchange(cut, {peer: [shards[k].shape for k in held] for peer, held in expected.items()})
        for peer, received in wait().items():
            for k, shard in zip(expected[peer], received, strict=True):
                shards[k].view(-1).copy_(shard)

    def _layout(self, k: int, peer: int) -> ShardLayout:
        matrix = self._matrices[k]
        key = matrix.shape, getattr(matrix, "placements", None)
        if key not in self._layouts:
            self._layouts[key] = [shard_layout(matrix, coordinate) for coordinate in self._coordinates]
        return self._layouts[key][peer]

    def _exchange(
        self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[torch.Size]]
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Send tensors to some ranks, and receive others of known shapes, in one message per direction and pair.

        Returns:
            A function that waits, and returns the tensors received from each rank, flat.
        """
        empty = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        flat = {peer: [each.view(-1) for each in parts] for peer, parts in outgoing.items()}
        sent = {peer: parts[0] if len(parts) == 1 else torch.cat([empty, *parts]) for peer, parts in flat.items()}
        sizes = {peer: [shape.numel() for shape in shapes] for peer, shapes in incoming.items()}
        received = {
            peer: sent[peer] if peer == self._own else empty.new_empty(sum(each)) for peer, each in sizes.items()
        }
        operations = [
            dist.P2POp(operation, buffer, self._ranks[peer], self._group)
            for operation, buffers in ((dist.isend, sent), (dist.irecv, received))
            for peer, buffer in buffers.items()
            if peer != self._own and buffer.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> dict[int, list[Tensor]]:
            for work in works:
                work.wait()
            sent.clear()  # until here, they are being read
            return {peer: list(received[peer].split(each)) if each else [] for peer, each in sizes.items()}

        return wait


def owners_of(matrices: Sequence[Tensor]) -> MatrixOwners | None:
    """The ranks that share `matrices`, which are all sharded alike or plain; None if this rank is alone."""
    over = {sharding_of(matrix) or replicas_of(matrix) for matrix in matrices}
    first = over.pop()
    if over or first is None or (isinstance(first, dist.ProcessGroup) and first.size() == 1):
        return None
    return MatrixOwners(matrices, first)


def cost(shape: torch.Size) -> int:
    """Of orthogonalizing a matrix or a stack of matrices: multiplications of a product, up to a factor."""
    return shape.numel() * min(shape[-2:])


def assign_owners(shapes: Sequence[torch.Size], parts: Sequence[range], ranks: int, first: int = 0) -> list[int]:
    """The owner of each matrix, a number below `ranks`: the one with the least work so far.

    Args:
        shapes: of the matrices.
        parts: those that are stepped together, the most expensive first. No owner gets another matrix of a part before
            all have one, so that none waits long.
        ranks: how many there are.
        first: the owner of the first matrix, modulo `ranks`.
    """
    owners, work = [0] * len(shapes), [0] * ranks
    for part in parts:
        order = sorted(((first + rank) % ranks for rank in range(ranks)), key=work.__getitem__)
        for place, k in enumerate(part):
            owners[k] = order[place % ranks]
            work[owners[k]] += cost(shapes[k])
    return owners
