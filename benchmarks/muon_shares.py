"""How ranks share Muon's work on Llama-3.1-8B: the assignment that training uses, on shapes alone.

python -m benchmarks.muon_shares
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Size

from benchmarks.evidence.page import markdown_table
from hf_lowprec.optim.sharding import FlatPart, set_flat_part
from hf_lowprec.optim.step.fused_group import CHUNK
from hf_lowprec.optim.step.matrix_owners import assign, cost, holder_of, order_of_steps

_LAYER = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
LLAMA_8B = [Size(shape) for shape in 32 * _LAYER]
RANKS = (8, 64, 512)
KINDS = ("FSDP2, ZeRO 3", "ZeRO 1 and 2", "DDP")


class Shares(NamedTuple):
    """How much a rank works, receives and holds in a step.

    Attributes:
        work: of the busiest rank, relative to an equal share.
        elements: that the busiest rank orthogonalizes, relative to an equal share.
        received: bytes that a rank receives, at most.
        held: the most elements of a part that are a rank's own and those that it orthogonalizes, relative to the
            largest matrix.
    """

    work: float
    elements: float
    received: int
    held: float


def shares(kind: str, ranks: int, shapes: Sequence[Size] = LLAMA_8B) -> Shares:
    """The shares of a `kind` in `KINDS`. BF16 is sent."""
    bounds = _bounds(kind, ranks, shapes)
    matrices = [torch.empty(0) for _ in shapes]
    for k, matrix in enumerate(matrices):
        no_group: Any = None
        set_flat_part(matrix, FlatPart(k, "", shapes[k], 0, bounds[k], no_group))
    order = order_of_steps(matrices)
    shapes, bounds, matrices = ([each[k] for k in order] for each in (shapes, bounds, matrices))
    given = {k: rank for k, (rank, holds_all) in enumerate(map(holder_of, matrices)) if holds_all}
    if kind == "DDP":
        given = dict.fromkeys(range(len(shapes)), 0)
    replicas, of_replica = (ranks, 1) if kind == "DDP" else (1, ranks)
    rounds, owners = assign(shapes, of_replica, replicas, given, CHUNK)
    work, elements, received, most = ([0] * ranks for _ in range(4))
    for replica, part in (item for parts in rounds for item in parts.items()):
        held = [0] * ranks
        for k in part:
            owner = replica + (owners[k] or 0)
            size = shapes[k].numel()
            work[owner] += cost(shapes[k])
            elements[owner] += size
            held[owner] += size
            for rank, (begin, end) in enumerate(pairwise(bounds[k])):
                held[rank] += end - begin
                if rank != owner:
                    received[rank] += size if kind == "DDP" else end - begin
                    received[owner] += end - begin
        most = list(map(max, most, held))
    largest = max(map(Size.numel, shapes))
    return Shares(_excess(work), _excess(elements), 2 * max(received), max(most) / largest)


def _bounds(kind: str, ranks: int, shapes: Sequence[Size]) -> list[tuple[int, ...]]:
    """Where the part of each matrix that a rank holds begins, and where the last one ends."""
    sizes = list(map(Size.numel, shapes))
    if kind == "DDP":
        return [(0,) * (ranks + 1)] * len(sizes)
    if kind != "ZeRO 1 and 2":
        return [tuple(rank * size // ranks for rank in range(ranks + 1)) for size in sizes]
    cut = -(-sum(sizes) // ranks)
    starts = accumulate(sizes, initial=0)
    return [
        tuple(min(max(rank * cut - start, 0), size) for rank in range(ranks + 1))
        for start, size in zip(starts, sizes, strict=False)
    ]


def _excess(values: list[int]) -> float:
    return max(values) * len(values) / sum(values)


def table() -> str:
    """Work of the busiest rank, and gigabytes received, by number of ranks."""
    heads = ["", *(f"work, {ranks} GPUs" for ranks in RANKS), *(f"GB, {ranks} GPUs" for ranks in RANKS)]
    total = 2 * sum(map(Size.numel, LLAMA_8B)) / 1e9
    alone = (f"{total * (ranks - 1) / ranks:.2f}" for ranks in RANKS)
    rows = [["FSDP2, if every GPU computes everything", *(f"{ranks:.2f}" for ranks in RANKS), *alone]]
    for kind in KINDS:
        found = [shares(kind, ranks) for ranks in RANKS]
        rows.append([kind, *(f"{each.work:.2f}" for each in found), *(f"{each.received / 1e9:.2f}" for each in found)])
    return markdown_table(heads, rows)


if __name__ == "__main__":
    print(table())
