"""Which rank orthogonalizes which matrix, if ranks hold shards or copies of them, and the messages between ranks.

Every matrix has one owner, which gets the shards of the matrix, computes what a single process computes, and sends each
rank the shard of the result. Under DDP, each rank has the whole matrix; with hybrid sharding, some ranks have the same
shard. If all shards of a stack of matrices consist of whole matrices, as those of experts do, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.optim.sharding import (
    Sharding,
    ShardLayout,
    is_sharded,
    local_shard,
    replicas_of,
    shard_layout,
    sharding_of,
)

_EACH_ITS_OWN = -1
"""In place of the owner: every rank orthogonalizes its own part."""


class MatrixOwners:
    """Who orthogonalizes some matrices. Ranks are counted from 0, in the order of the mesh or group.

    Attributes:
        parts: the matrices that are stepped together.
        count: how many ranks share the matrices.

    Args:
        matrices: the parameters, the most expensive first: DTensors that are sharded over the same dimensions of the
            same mesh, or plain tensors.
        most: elements of a part, unless it has one matrix per rank.
        at_once: how many matrices of a shape in a stack are orthogonalized at once, independently of all others.
        first: the owner of the first matrix, modulo `count`.
    """

    def __init__(self, matrices: Sequence[Any], most: int, at_once: Callable[[torch.Size], int], first: int) -> None:
        self._matrices, self._device = matrices, local_shard(matrices[0]).device
        self._ranks, self._group = [0], None
        over = {sharding_of(matrix) or replicas_of(matrix) for matrix in matrices}
        shared = over.pop() if len(over) == 1 else None
        copies: list[tuple[int, ...]] = [()]
        self._coordinates = copies
        if isinstance(shared, Sharding):
            mesh = shared.mesh
            self._group = mesh.get_group() if mesh.ndim == 1 else None  # any two ranks are in the default group
            self._ranks, self._coordinates = mesh.mesh.flatten().tolist(), list(product(*map(range, mesh.shape)))
            dims = [dim for dim in range(mesh.ndim) if dim not in shared.mesh_dims]
            copies = [tuple(each[dim] for dim in dims) for each in self._coordinates]
        elif shared is not None:
            self._group, self._ranks = shared, dist.get_process_group_ranks(shared)
            self._coordinates = copies = [(rank,) for rank in self._ranks]
        self.count = len(self._ranks)
        self._own = self._ranks.index(dist.get_rank()) if self.count > 1 else 0
        self._with_same_copy = [peer for peer, each in enumerate(copies) if each == copies[self._own]]
        self._layouts: dict[Any, list[ShardLayout]] = {}
        shapes = [matrix.shape for matrix in matrices]
        self.parts = parts_of(shapes, self.count, most)
        apart = {k for k, shape in enumerate(shapes) if self._are_apart(k, at_once(shape[-2:]))}
        self._owners = assign_owners(shapes, self.parts, self.count, apart, first)

    def _are_apart(self, k: int, at_once: int) -> bool:
        """Return whether the shards of a stack can be orthogonalized as they are, to the bits of the whole stack."""
        whole = self._matrices[k].shape
        if len(whole) == 2 or not is_sharded(self._matrices[k]):
            return False
        bounds = []
        for peer in range(self.count):
            shape, blocks = self._layout(k, peer)
            if shape.numel() and (shape[1:] != whole[1:] or len(blocks) > 1):
                return False
            bounds += [bound for _, place in blocks for bound in (place[0].start, place[0].stop)]
        return all(bound % at_once == 0 or bound == whole[0] for bound in bounds)

    def gather(self, shards: Mapping[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's `shards`, given by the positions of the matrices, to the owners.

        Returns:
            A function that waits, and returns what this rank orthogonalizes: the matrices that it owns, and those of
            its `shards` that are not sent.
        """
        if self.count == 1:
            return lambda: dict(shards)
        owners = {k: self._owners[k] for k in shards}
        own = [k for k, owner in owners.items() if owner == self._own]
        layouts = {peer: [self._layout(k, peer) for k in own] for peer in self._with_same_copy}
        sent = {peer: [shards[k] for k, owner in owners.items() if owner == peer] for peer in self._with_same_copy}
        wait = self._exchange(sent, {peer: [each.shape for each in held] for peer, held in layouts.items()})

        def matrices() -> dict[int, Tensor]:
            received = wait()
            found = {k: shards[k] for k, owner in owners.items() if owner == _EACH_ITS_OWN}
            found |= {k: shards[k].new_empty(self._matrices[k].shape) for k in own}
            for peer, held in layouts.items():
                for k, layout, shard in zip(own, held, received[peer], strict=True):
                    layout.paste(shard, found[k])
            return found

        return matrices

    def scatter(self, results: Mapping[int, Tensor], shards: Mapping[int, Tensor]) -> None:
        """Overwrite the `shards` of matrices by those of the owners' `results`."""
        if self.count == 1:
            return
        sent = {k: result for k, result in results.items() if self._owners[k] == self._own}
        everyone = range(self.count)
        cut = {peer: [self._layout(k, peer).cut(result) for k, result in sent.items()] for peer in everyone}
        expected = {peer: [k for k in shards if self._owners[k] == peer] for peer in everyone}
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


def cost(shape: torch.Size) -> int:
    """Multiplications of a matrix product for a matrix or a stack of matrices of `shape`, up to a factor."""
    return shape.numel() * min(shape[-2:])


def parts_of(shapes: Sequence[torch.Size], ranks: int, most: int) -> list[range]:
    """Consecutive matrices with at most so many elements together, or one per rank with more.

    Args:
        shapes: of the matrices, the most expensive first. So the part whose temporaries take most memory is the first:
            running out of memory leaves all weights of the group unchanged.
        ranks: how many share the work.
        most: elements.
    """
    parts, first, total = list[range](), 0, 0
    for k, size in enumerate(map(torch.Size.numel, shapes)):
        if k >= first + ranks and total + size > most:
            parts.append(range(first, k))
            first, total = k, 0
        total += size
    return [*parts, range(first, len(shapes))]


def assign_owners(
    shapes: Sequence[torch.Size], parts: Sequence[range], ranks: int, apart: Set[int] = frozenset(), first: int = 0
) -> list[int]:
    """The owner of each matrix, a number below `ranks`: the one with the least work so far.

    Args:
        shapes: of the matrices.
        parts: those that are stepped together, the most expensive first. No owner gets another matrix of a part before
            all have one, so that none waits long.
        ranks: how many there are.
        apart: matrices without an owner.
        first: the owner of the first matrix, modulo `ranks`.
    """
    owners, work = [_EACH_ITS_OWN] * len(shapes), [0] * ranks
    for part in parts:
        order = sorted(((first + rank) % ranks for rank in range(ranks)), key=work.__getitem__)
        for place, k in enumerate(k for k in part if k not in apart):
            owners[k] = order[place % ranks]
            work[owners[k]] += cost(shapes[k])
    return owners
