"""Shards of distributed tensors: which elements of the full tensor a rank holds.

Random bits belong to elements of the full tensor (their row-major index there), so a rank must know the indices of its
elements, whatever dimension is sharded and however unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

Run = tuple[int, int, int]
"""`(first local element, length, first global index)` of elements that are neighbours in both."""


Sharding = tuple[Any, tuple[int, ...]]
"""A device mesh, and its dimensions over which a tensor is sharded."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory; `tensor` itself if it is not distributed."""
    with torch.no_grad():
        part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How `tensor` is spread; None if every rank has all of it."""
    if not is_sharded(tensor):
        return None
    dims = tuple(k for k, placement in enumerate(tensor.placements) if _shards(placement))  # type: ignore[attr-defined]
    return (tensor.device_mesh, dims) if dims else None  # type: ignore[attr-defined]


def distributed(part: Tensor, like: Tensor) -> Tensor:
    """The contiguous tensor whose part on this rank is `part`, distributed as `like`, which may be plain."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=stride)  # type: ignore[attr-defined]


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor, on every rank, whose part on this one is `part`; distributed as `like`, which may be plain."""
    placed = distributed(part, like)
    return placed.full_tensor() if is_sharded(placed) else placed  # type: ignore[attr-defined]


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that is to be distributed as `like`; the inverse of `gathered`, contiguous."""
    if not is_sharded(like):
        return full.contiguous()
    part = full.new_empty(local(like).shape)
    for first, length, start in runs(like):
        part.view(-1)[first : first + length] = full.reshape(-1)[start : start + length]
    return part


def sum_over_shards(value: Tensor, sharding: Sharding | None) -> Tensor:
    """The sum of `value` over the ranks among which tensors spread so are divided; in place."""
    if sharding is not None:
        mesh, dims = sharding
        for dim in dims:
            torch.distributed.all_reduce(value, group=mesh.get_group(dim))
    return value


def check_placements(tensor: Tensor, where: str) -> None:
    """Raise ValueError unless this rank holds whole elements of `tensor`."""
    if is_sharded(tensor):
        for placement in tensor.placements:  # type: ignore[attr-defined]
            if not _shards(placement) and not placement.is_replicate():
                raise ValueError(f"{where} is placed as {placement}; supported are sharded and replicated DTensors")


def runs(tensor: Tensor) -> Iterator[Run]:
    """The runs of this rank's part of `tensor`, in its order."""
    part, shape = local(tensor), tensor.shape
    held = [_held(tensor, dim) for dim in range(len(shape))] if is_sharded(tensor) else []
    if all(len(indices) == size for indices, size in zip(held, shape, strict=False)):
        if part.numel():
            yield 0, part.numel(), 0
        return
    if math.prod(map(len, held)) != part.numel():
        raise ValueError(
            f"a DTensor of shape {tuple(shape)} placed as {tensor.placements} holds {tuple(part.shape)} here, and not "  # type: ignore[attr-defined]
            f"the expected {tuple(map(len, held))}"
        )
    inner = max(dim for dim, size in enumerate(shape) if len(held[dim]) < size)
    width = math.prod(shape[inner + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(inner)]
    first = 0
    for outer in product(*(indices.tolist() for indices in held[:inner])):
        base = sum(index * stride for index, stride in zip(outer, strides, strict=True))
        for begin, count in _neighbours(held[inner]):
            yield first, count * width, base + begin * width
            first += count * width


def _shards(placement: Any) -> bool:
    # Strided sharding (tensor parallel before data parallel) is no `Shard` of torch's in every version.
    return placement.is_shard() or hasattr(placement, "split_factor")


def _held(tensor: Any, dim: int) -> Tensor:
    """Which indices of dimension `dim` this rank holds: DTensor's sharding, which is that of `torch.chunk`."""
    indices = torch.arange(tensor.shape[dim], device="cpu")
    mesh = tensor.device_mesh
    for k, placement in enumerate(tensor.placements):
        if _shards(placement) and placement.dim == dim:
            parts, place = mesh.size(k), mesh.get_coordinate()[k]
            factor = int(getattr(placement, "split_factor", 1))
            pieces = torch.chunk(indices, parts * factor)
            indices = torch.cat([indices[:0], *pieces[place::parts]])
    return indices


def _neighbours(indices: Tensor) -> Iterator[tuple[int, int]]:
    """`(first, length)` of the stretches of consecutive numbers in an ascending tensor."""
    if len(indices) == 0:
        return
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(indices)], strict=True):
        yield int(indices[begin]), end - begin
