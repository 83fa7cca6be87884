"""Decides which rank orthogonalizes which matrix, if ranks hold shards or replicas of matrices.

Every matrix has one owner, which gets the shards of the matrix, computes what a single process computes, and sends each
rank its shard of the result. Ranks that together have all shards are a *replica*: with FSDP2 and ZeRO, all ranks form
one; under DDP, each rank is one; with hybrid sharding, there are several replicas of several ranks. Each replica
orthogonalizes some of the matrices, and broadcasts the results to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import ShardLayout, flat_part, full_shape, is_sharded, shard_layout
from hf_lowprec.optim.step.sharing_ranks import SharingRanks


class MatrixOwners:
    """The owners of some matrices.

    Attributes:
        rounds: the matrices in the order of their steps: for each replica that takes part in a round, the ones that it
            owns, consecutive and stepped together.
        ranks: the ranks that share the work.

    Args:
        matrices: the parameters, in the order that `order_of_steps` gives. They are shared in the same way: DTensors
            sharded over the same dimensions of a mesh, parts of flattened parameters, or plain tensors.
        ranks: see above.
        max_elements: the most elements that are stepped together; one matrix per rank of a replica may have more.
        at_once: how many matrices of a shape in a stack are orthogonalized at once, independently of all others.
        first: the rank that gets the first matrix, modulo the number of ranks, so that small groups do not all begin
            with rank 0.
    """

    def __init__(
        self,
        matrices: Sequence[Any],
        ranks: SharingRanks,
        max_elements: int,
        at_once: Callable[[torch.Size, torch.device], int],
        first: int,
    ) -> None:
        self._matrices, self.ranks = matrices, ranks
        self._layouts: dict[Any, list[ShardLayout]] = {}
        self._peers = range(len(ranks.shards))
        shapes = list(map(full_shape, matrices))
        given: dict[int, int | None] = {}
        for k, matrix in enumerate(matrices):
            holder, is_whole = holder_of(matrix)
            if is_whole:
                given[k] = holder
            elif self._is_held(k, at_once(shapes[k][-2:], ranks.device)):
                given[k] = None
        counts = len(ranks.shards), len(ranks.replicas)
        self.rounds, self._owners = assign(shapes, *counts, given, max_elements, first)

    def _is_held(self, k: int, at_once: int) -> bool:
        """Return whether ranks can orthogonalize what they hold (the matrix, or whole experts) with the same bits."""
        whole = self._matrices[k].shape
        if len(self.ranks.shards) == 1:
            return True
        if len(whole) == 2 or not is_sharded(self._matrices[k]):
            return False
        bounds = []
        for shape, blocks in self._layouts_of(k):
            if shape.numel() and (shape[1:] != whole[1:] or len(blocks) > 1):
                return False
            bounds += [bound for _, place in blocks for bound in (place[0].start, place[0].stop)]
        return all(bound % at_once == 0 or bound == whole[0] for bound in bounds)

    def gather(self, shards: Mapping[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's `shards`, given by the positions of the matrices, to their owners in this replica.

        Returns:
            A function that waits, and returns what this rank orthogonalizes: the matrices that it owns, and the
            `shards` that are not sent.
        """
        own = [k for k in shards if self._owners[k] == self.ranks.shards.own]
        sent = [[shards[k] for k in shards if self._owners[k] == peer] for peer in self._peers]
        layouts = [[self._layouts_of(k)[peer] for k in own] for peer in self._peers]
        wait = self.ranks.exchange(sent, [[layout.shape.numel() for layout in held] for held in layouts])

        def matrices() -> dict[int, Tensor]:
            received = wait()
            found = {k: shard for k, shard in shards.items() if self._owners[k] is None}
            found |= {k: shards[k].new_empty(full_shape(self._matrices[k])) for k in own}
            for of_peer in zip(layouts, received, strict=True):
                for k, layout, shard in zip(own, *of_peer, strict=True):
                    layout.paste(shard, found[k])
            return found

        return matrices

    def scatter(self, results: Mapping[int, Tensor], shards: Mapping[int, Tensor]) -> None:
        """Overwrite this rank's `shards` of matrices with the shards of the owners' `results`, in this replica."""
        own = [k for k in results if self._owners[k] == self.ranks.shards.own]
        cut = [[self._layouts_of(k)[peer].cut(results[k]) for k in own] for peer in self._peers]
        expected = [[shards[k] for k in shards if self._owners[k] == peer] for peer in self._peers]
        wait = self.ranks.exchange(cut, [[shard.numel() for shard in held] for held in expected])
        for held, received in zip(expected, wait(), strict=True):
            for shard, result in zip(held, received, strict=True):
                shard.view(-1).copy_(result)

    def _layouts_of(self, k: int) -> list[ShardLayout]:
        """Return the layouts of a matrix on the ranks of this replica."""
        matrix = self._matrices[k]
        key = getattr(matrix, "placements", k), matrix.shape
        if key not in self._layouts:
            self._layouts[key] = [shard_layout(matrix, coordinate) for coordinate in self.ranks.shards.coordinates]
        return self._layouts[key]


def holder_of(matrix: Tensor) -> tuple[int, bool]:
    """Return the rank that holds most of a matrix that is cut as a flattened tensor, and whether it holds all of it.

    For other matrices, return rank 0 and False.
    """
    part = flat_part(matrix)
    lengths = [end - begin for begin, end in pairwise(part.bounds)] if part else [0]
    return lengths.index(max(lengths)), part is not None and max(lengths) == sum(lengths)


def order_of_steps(matrices: Iterable[Tensor]) -> list[int]:
    """Return the positions of matrices in the order in which they are stepped: the largest first.

    Equal matrices that different ranks hold alternate, so that consecutive ones are not all in one rank's memory.
    """
    counts, keys = Counter[tuple[int, int]](), list[tuple[int, int]]()
    for matrix in matrices:
        kind = full_shape(matrix).numel(), holder_of(matrix)[0]
        keys.append((-kind[0], counts[kind]))
        counts[kind] += 1
    return sorted(range(len(keys)), key=keys.__getitem__)


def cost(shape: torch.Size) -> int:
    """Return the multiplications in a matrix product for a matrix or stack of `shape`, up to a factor."""
    return shape.numel() * min(shape[-2:])


def assign(
    shapes: Sequence[torch.Size],
    ranks: int,
    replicas: int,
    given: Mapping[int, int | None],
    max_elements: int,
    first: int = 0,
) -> tuple[list[dict[int, range]], list[int | None]]:
    """Assign matrices to replicas, and in each of them to ranks.

    Args:
        shapes: the shapes of the matrices, in the order of their steps.
        ranks: the number of ranks of a replica.
        replicas: how many replicas share the work.
        given: the owners of some matrices.
        max_elements: the most elements that are stepped together; one matrix per rank of a replica may have more.
        first: the replica, and its rank, that gets the first matrix, modulo their numbers.

    Returns:
        The rounds, see `MatrixOwners`; and the owner of each matrix, a rank of its replica, or None if every rank
        orthogonalizes what it holds.
    """
    rounds = _rounds(shapes, _parts(shapes, ranks, replicas, max_elements), replicas, first)
    owners = [given.get(k) for k in range(len(shapes))]
    work = [[0] * ranks for _ in range(replicas)]
    for replica, part in (item for parts in rounds for item in parts.items()):
        own = work[replica]
        for k in part:
            if (owner := owners[k]) is not None:
                own[owner] += cost(shapes[k])
        # Ranks take turns within a part, so that none waits long.
        order = _least_first(own, first)
        for place, k in enumerate(k for k in part if k not in given):
            owners[k] = owner = order[place % ranks]
            own[owner] += cost(shapes[k])
    return rounds, owners


def _parts(shapes: Sequence[torch.Size], ranks: int, replicas: int, max_elements: int) -> list[range]:
    """Divide matrices into parts that are stepped together. Each replica gets a part, if there are enough matrices.

    The largest matrices come first, so the first part's temporaries take most memory: if it runs out of memory, this
    rank has not changed a weight of the group.
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


def _rounds(shapes: Sequence[torch.Size], parts: Sequence[range], replicas: int, first: int) -> list[dict[int, range]]:
    """Divide parts into rounds, in which each replica owns a part, if there are enough."""
    work, rounds = [0] * replicas, []
    for start in range(0, len(parts), replicas):
        order = _least_first(work, first)
        rounds.append(dict(zip(order, parts[start : start + replicas], strict=False)))
        for replica, part in rounds[-1].items():
            work[replica] += sum(cost(shapes[k]) for k in part)
    return rounds


def _least_first(work: Sequence[int], first: int) -> list[int]:
    """Return positions in `work`, the least work first; equal ones begin with `first`, modulo their number."""
    return sorted(((first + k) % len(work) for k in range(len(work))), key=work.__getitem__)
