"""Which rank orthogonalizes which matrix, if ranks hold shards or replicas of them, and the messages between ranks.

Every matrix has one owner, which gets the shards of the matrix, computes what a single process computes, and sends each
rank its shard of the result. Ranks that have all shards between them are a *replica*: with FSDP2, all ranks are one;
under DDP, each rank is one; with hybrid sharding, there are several of several ranks. Each replica orthogonalizes some
of the matrices, and broadcasts the results to the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hf_lowprec.optim.sharding import Replicas, Sharding, ShardLayout, is_sharded, local_shard, shard_layout

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


class MatrixOwners:
    """Who orthogonalizes some matrices.

    Attributes:
        rounds: the matrices in the order of their steps: for each replica that takes part in a round, the ones that it
            owns, consecutive and stepped together.
        replica: this rank's, a position in a round.

    Args:
        matrices: the parameters in the order in which `parts_of` divides them: DTensors that are sharded over the same
            dimensions of the same mesh, or plain tensors.
        shared: how they are sharded, or the ranks that have the same plain tensors, or None.
        max_elements: of matrices that are stepped together, unless they are one per rank of a replica.
        at_once: how many matrices of a shape in a stack are orthogonalized at once, independently of all others.
        first: which rank takes part first, modulo their number.
    """

    def __init__(
        self,
        matrices: Sequence[Any],
        shared: Sharding | Replicas | None,
        max_elements: int,
        at_once: Callable[[torch.Size], int],
        first: int,
    ) -> None:
        self._matrices, self._device = matrices, local_shard(matrices[0]).device
        self._layouts: dict[Any, list[ShardLayout]] = {}
        self._broadcasts: list[_Broadcast] = []
        self._ranks, self._group = [0], None  # of this replica
        self._coordinates: list[tuple[int, ...]] = [()]
        self.replica, replicas = 0, list[tuple[int, ...]]([()])
        if isinstance(shared, Sharding):
            mesh, sizes = shared.mesh, shared.mesh.shape
            own = mesh.get_coordinate()
            assert own is not None
            copied = [dim for dim in range(mesh.ndim) if dim not in shared.mesh_dims]
            every = list(product(*map(range, sizes)))
            self._coordinates = [each for each in every if all(each[dim] == own[dim] for dim in copied)]
            self._ranks = [int(mesh.mesh[each]) for each in self._coordinates]
            self._group = _group_of(shared, self._ranks)
            replicas = list(product(*(range(sizes[dim]) for dim in copied)))
            self.replica = replicas.index(tuple(own[dim] for dim in copied))
            for dim in copied:
                line = [int(mesh.mesh[(*own[:dim], place, *own[dim + 1 :])]) for place in range(sizes[dim])]
                self._broadcasts.append(_Broadcast(mesh.get_group(dim), line))
        elif shared is not None:
            line = dist.get_process_group_ranks(shared.group)
            replicas = [(place,) for place in range(len(line))]
            self.replica = line.index(dist.get_rank())
            self._ranks = [line[self.replica]]
            self._broadcasts = [_Broadcast(shared.group, line)]
        self._replicas = replicas
        self._own = self._ranks.index(dist.get_rank()) if shared is not None else 0
        shapes = [matrix.shape for matrix in matrices]
        parts = parts_of(shapes, len(self._ranks), len(replicas), max_elements)
        self.rounds = assign_replicas(shapes, parts, len(replicas), first)
        held = {k for k, shape in enumerate(shapes) if self._is_held(k, at_once(shape[-2:]))}
        self._owners = assign_owners(shapes, self.rounds, len(self._ranks), held, first)

    @property
    def sends_shards(self) -> bool:
        """Whether a replica consists of several ranks."""
        return len(self._ranks) > 1

    def _is_held(self, k: int, at_once: int) -> bool:
        """Return whether ranks can orthogonalize what they hold, with the same bits: the matrix, or whole experts."""
        whole = self._matrices[k].shape
        if not self.sends_shards:
            return True
        if len(whole) == 2 or not is_sharded(self._matrices[k]):
            return False
        bounds = []
        for shape, blocks in map(self._layouts_of(k).__getitem__, range(len(self._ranks))):
            if shape.numel() and (shape[1:] != whole[1:] or len(blocks) > 1):
                return False
            bounds += [bound for _, place in blocks for bound in (place[0].start, place[0].stop)]
        return all(bound % at_once == 0 or bound == whole[0] for bound in bounds)

    def gather(self, shards: Mapping[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's `shards`, given by the positions of the matrices, to their owners in this replica.

        Returns:
            A function that waits, and returns what this rank orthogonalizes: the matrices that it owns, and those of
            its `shards` that are not sent.
        """
        owners = {k: self._owners[k] for k in shards}
        own = [k for k, owner in owners.items() if owner == self._own]
        sent = {peer: [shards[k] for k in shards if owners[k] == peer] for peer in range(len(self._ranks))}
        layouts = {peer: [self._layouts_of(k)[peer] for k in own] for peer in range(len(self._ranks))}
        wait = self._exchange(sent, {peer: [each.shape for each in held] for peer, held in layouts.items()})

        def matrices() -> dict[int, Tensor]:
            received = wait()
            found = {k: shards[k] for k, owner in owners.items() if owner is None}
            found |= {k: shards[k].new_empty(self._matrices[k].shape) for k in own}
            for peer, shards_of_peer in received.items():
                for k, layout, shard in zip(own, layouts[peer], shards_of_peer, strict=True):
                    layout.paste(shard, found[k])
            return found

        return matrices

    def scatter(self, results: Mapping[int, Tensor], shards: Mapping[int, Tensor]) -> None:
        """Overwrite this rank's `shards` of matrices by those of the owners' `results`, in this replica."""
        own = [k for k in results if self._owners[k] == self._own]
        peers = range(len(self._ranks))
        cut = {peer: [self._layouts_of(k)[peer].cut(results[k]) for k in own] for peer in peers}
        expected = {peer: [k for k in shards if self._owners[k] == peer] for peer in peers}
        wait = self._exchange(cut, {peer: [shards[k].shape for k in held] for peer, held in expected.items()})
        for peer, received in wait().items():
            for k, shard in zip(expected[peer], received, strict=True):
                shards[k].view(-1).copy_(shard)

    def broadcast(self, memory: Tensor, replica: int) -> None:
        """Give all replicas the `memory` of one of them: each rank gets that of the rank with the same shards."""
        source, own = self._replicas[replica], self._replicas[self.replica]
        for dim, (group, ranks) in enumerate(self._broadcasts):
            if own[dim + 1 :] == source[dim + 1 :] and memory.numel():
                dist.broadcast(memory, ranks[source[dim]], group=group)

    def _layouts_of(self, k: int) -> list[ShardLayout]:
        """The layouts of a matrix on the ranks of this replica."""
        matrix = self._matrices[k]
        key = matrix.shape, getattr(matrix, "placements", None)
        if key not in self._layouts:
            self._layouts[key] = [shard_layout(matrix, coordinate) for coordinate in self._coordinates]
        return self._layouts[key]

    def _exchange(
        self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[torch.Size]]
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Send tensors to ranks of this replica and receive others of known shapes, in one message to or from each.

        Returns:
            A function that waits, and returns the tensors received from each rank that has sent some, flat.
        """
        flat = {peer: [each.view(-1) for each in tensors] for peer, tensors in outgoing.items() if tensors}
        sent = {peer: parts[0] if len(parts) == 1 else torch.cat(parts) for peer, parts in flat.items()}
        sizes = {peer: [shape.numel() for shape in shapes] for peer, shapes in incoming.items() if shapes}
        empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=self._device)
        received = {peer: sent[peer] if peer == self._own else empty(sum(each)) for peer, each in sizes.items()}
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
            return {peer: list(received[peer].split(lengths)) for peer, lengths in sizes.items()}

        return wait


def _group_of(sharding: Sharding, ranks: list[int]) -> Any:
    """The process group of the ranks that have all shards between them."""
    if len(sharding.mesh_dims) == 1:
        return sharding.mesh.get_group(sharding.mesh_dims[0])
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if tuple(ranks) not in groups:
        groups[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return groups[tuple(ranks)]


def cost(shape: torch.Size) -> int:
    """Multiplications of a matrix product for a matrix or a stack of matrices of `shape`, up to a factor."""
    return shape.numel() * min(shape[-2:])


def parts_of(shapes: Sequence[torch.Size], ranks: int, replicas: int, max_elements: int) -> list[range]:
    """Consecutive matrices that are stepped together: with at most so many elements, or one per rank of a replica.

    Each replica gets a part, if there are enough matrices.

    Args:
        shapes: of the matrices, the largest first. So the part whose temporaries take most memory is the first: running
            out of memory leaves all weights of the group unchanged.
        ranks: of a replica.
        replicas: how many share the work.
        max_elements: of a part.
    """
    sizes = list(map(torch.Size.numel, shapes))
    most = min(max_elements, -(-sum(sizes) // replicas))
    parts, first, total = list[range](), 0, 0
    for k, size in enumerate(sizes):
        if k >= first + ranks and total + size > most:
            parts.append(range(first, k))
            first, total = k, 0
        total += size
    return [*parts, range(first, len(shapes))]


def assign_replicas(
    shapes: Sequence[torch.Size], parts: Sequence[range], replicas: int, first: int = 0
) -> list[dict[int, range]]:
    """Rounds of parts: each replica owns one, if there are enough. Those with least work so far come first.

    Args:
        shapes: of the matrices.
        parts: positions of the matrices that are stepped together.
        replicas: how many there are.
        first: which replica comes first, modulo their number.
    """
    work, rounds = [0] * replicas, []
    for start in range(0, len(parts), replicas):
        order = sorted(((first + replica) % replicas for replica in range(replicas)), key=work.__getitem__)
        rounds.append(dict(zip(order, parts[start : start + replicas], strict=False)))
        for replica, part in rounds[-1].items():
            work[replica] += sum(cost(shapes[k]) for k in part)
    return rounds


def assign_owners(
    shapes: Sequence[torch.Size],
    rounds: Sequence[Mapping[int, range]],
    ranks: int,
    held: Set[int] = frozenset(),
    first: int = 0,
) -> list[int | None]:
    """The owner of each matrix, a rank of its replica; None if every rank orthogonalizes what it holds.

    Ranks with least work so far come first, and take turns within a part, so that none waits long.

    Args:
        shapes: of the matrices.
        rounds: what `assign_replicas` returns.
        ranks: of a replica.
        held: matrices without an owner.
        first: the rank that comes first, modulo their number.
    """
    owners: list[int | None] = [None] * len(shapes)
    work: dict[int, list[int]] = {}
    for replica, part in (item for parts in rounds for item in parts.items()):
        own = work.setdefault(replica, [0] * ranks)
        order = sorted(((first + rank) % ranks for rank in range(ranks)), key=own.__getitem__)
        for place, k in enumerate(k for k in part if k not in held):
            owners[k] = owner = order[place % ranks]
            own[owner] += cost(shapes[k])
    return owners
