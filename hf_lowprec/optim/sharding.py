"""Shards: which elements of the full tensor this rank holds, and conversions between shard and full tensor.

An element's random bits depend on its index in the full tensor (row-major), so a rank has to know the indices of its
elements, whichever dimensions are sharded and however unevenly. Shards belong to DTensors, or are parts of flattened
parameters (`FlatPart`). Every function also accepts plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_lowprec.optim.private_torch_apis import dtensor_of_blocks, dtensor_of_shard, local_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class ContiguousRun(NamedTuple):
    """Elements that are contiguous both in a rank's shard and in the full tensor.

    Attributes:
        local_start: index of the first element in the shard.
        length: number of elements.
        global_start: index of the first element in the full tensor.
    """

    local_start: int
    length: int
    global_start: int


@dataclass(frozen=True)
class Sharding:
    """The ranks over which a tensor is sharded.

    Attributes:
        mesh: the device mesh.
        mesh_dims: the dimensions of `mesh` over which the tensor is sharded; over the others it is replicated.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]


class ShardLayout(NamedTuple):
    """Where the elements of a rank's shard are in the full tensor.

    Attributes:
        shape: the shape of the shard.
        blocks: indices of parts of the shard, and of the same parts in the full tensor; strided placements have
            several. Blocks of a 1-D shard are indices of the flattened tensor.
    """

    shape: torch.Size
    blocks: list[tuple[tuple[slice, ...], tuple[slice, ...]]]

    def cut(self, full: Tensor) -> Tensor:
        """Cut the contiguous shard from the tensor `full`."""
        shard, full = full.new_empty(self.shape), full.view(-1) if len(self.shape) == 1 else full
        for local, place in self.blocks:
            shard[local] = full[place]
        return shard

    def paste(self, shard: Tensor, full: Tensor) -> None:
        """Copy `shard`, flat or of the shard's shape, to its place in `full`."""
        shard, full = shard.view(self.shape), full.view(-1) if len(self.shape) == 1 else full
        for local, place in self.blocks:
            full[place] = shard[local]


class Replicas(NamedTuple):
    """Ranks that step the same tensors.

    Attributes:
        group: the ranks.
        are_equal: whether they have the same gradients.
    """

    group: ProcessGroup
    are_equal: Callable[[], bool]


class FlatPart(NamedTuple):
    """The elements of a parameter that a 1-D tensor holds: a range of the flattened parameter, as DeepSpeed cuts it.

    Attributes:
        number: the parameter's position in its optimizer before it was cut.
        name: the parameter's name in the model.
        shape: the parameter's shape.
        start: index of the range's first element in the parameter.
        bounds: where the ranges of all ranks begin, in the order of the ranks, and where the last one ends.
        group: the ranks.
    """

    number: int
    name: str
    shape: torch.Size
    start: int
    bounds: tuple[int, ...]
    group: ProcessGroup


_FLAT_PART = "_flat_part"
_REPLICAS = WeakTensorKeyDictionary()
_PLAIN = {Tensor, torch.nn.Parameter}


def set_flat_part(tensor: Tensor, part: FlatPart) -> None:
    """Set which elements of a parameter the 1-D `tensor` holds."""
    setattr(tensor, _FLAT_PART, part)


def flat_part(tensor: Any) -> FlatPart | None:
    """Return which elements of a parameter `tensor` holds, if `set_flat_part` has set them."""
    return getattr(tensor, _FLAT_PART, None)


def part_of(tensor: Tensor) -> FlatPart:
    """Return which elements of a parameter `tensor` holds; `set_flat_part` must have set them."""
    part: FlatPart = getattr(tensor, _FLAT_PART)
    return part


def set_replicas(tensors: Iterable[Tensor], group: ProcessGroup, are_equal: Callable[[], bool]) -> None:
    """Record that the ranks of `group` step the same plain `tensors` with the same gradients, as under DDP.

    Args:
        tensors: the parameters.
        group: the ranks.
        are_equal: returns whether this holds in the coming step.
    """
    for tensor in tensors:
        _REPLICAS[tensor] = Replicas(group, are_equal)


def replicas_of(tensor: Tensor) -> Replicas | None:
    """Return the ranks that take the coming step of the same plain `tensor`; None if only this rank does."""
    found: Replicas | None = _REPLICAS.get(tensor)
    return found if found is not None and found.group.size() > 1 and found.are_equal() else None


def full_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the full tensor; for a parameter under ZeRO 3, this is `ds_shape`."""
    part = flat_part(tensor)
    return getattr(tensor, "ds_shape", tensor.shape) if part is None else part.shape


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a `DTensor`, replicated ones included."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; return a plain tensor unchanged.

    This waits for communication that has yet to write the shard.
    """
    return tensor if type(tensor) in _PLAIN else when_written(local_tensors([tensor])[0])


def when_written(shard: Tensor) -> Tensor:
    """Return `shard` itself or, if communication has yet to write it (see `DTensor.to_local`), what was written.

    Until it is written, such a shard has the address 0.
    """
    return shard.wait() if hasattr(shard, "wait") else shard


def sharding_of(tensor: Any, dim: int | None = None) -> Sharding | None:
    """Return the sharding of `tensor`, or of its dimension `dim`; None if every rank holds all of it."""
    dims = _mesh_dims(tensor, dim)
    return Sharding(tensor.device_mesh, dims) if dims else None


def placements_of_mean(tensor: Any, dim: int | None) -> Any:
    """Return the placements of a mean of the DTensor `tensor` over dimension `dim`; its own if `dim` is None."""
    from torch.distributed.tensor import Replicate

    whole = None if dim is None else dim % tensor.dim()
    return tuple(Replicate() if _is_shard(p) and p.dim == whole else p for p in tensor.placements)


def dtensor_like(
    shard: Tensor, like: Tensor, shape: Sequence[int] | None = None, mean_over: int | None = None
) -> Tensor:
    """Make a contiguous DTensor of this rank's `shard`, placed like `like`; `shard` itself if `like` is plain.

    Args:
        shard: this rank's part; it may be on the CPU while the mesh is of GPUs.
        like: the tensor that is sharded in the same way.
        shape: the shape of the full tensor, by default that of `like`. It may differ from `like` in the number of
            dimensions after the sharded ones.
        mean_over: the dimension over which it is a mean, which every rank has in full.
    """
    if not is_sharded(like):
        return shard
    full = torch.empty(like.shape if shape is None else shape, dtype=shard.dtype, device="meta")
    return dtensor_of_shard(shard, like.device_mesh, placements_of_mean(like, mean_over), full)  # type: ignore[attr-defined]


def shard_layout(tensor: Tensor, coordinate: Sequence[int] | None = None) -> ShardLayout:
    """Return the layout of a DTensor's shard on the rank at `coordinate` of its mesh; by default, on this rank.

    For a part of a flattened parameter, `coordinate` is the rank in its group. Any other plain tensor is its own shard
    on every rank.
    """
    if part := flat_part(tensor):
        (rank,) = (part.group.rank(),) if coordinate is None else coordinate
        begin, end = part.bounds[rank : rank + 2]
        return ShardLayout(torch.Size([end - begin]), [((slice(end - begin),), (slice(begin, end),))])
    indices = [_local_indices(tensor, dim, coordinate) for dim in range(tensor.dim())]
    blocks = [
        (
            tuple(slice(run.local_start, run.local_start + run.length) for run in block),
            tuple(slice(run.global_start, run.global_start + run.length) for run in block),
        )
        for block in product(*map(_consecutive_runs, indices))
    ]
    return ShardLayout(torch.Size(map(len, indices)), blocks)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's contiguous shard of the tensor `full`, sharded like `like`."""
    return shard_layout(like).cut(full) if is_sharded(like) else full.contiguous()


def sum_over_shards(value: Tensor, sharding: Sharding | None) -> Tensor:
    """Sum `value`, in place, over the ranks that hold different shards of the same tensors."""
    if sharding is not None:
        for dim in sharding.mesh_dims:
            torch.distributed.all_reduce(value, group=sharding.mesh.get_group(dim))
    return value


def check_placements(tensor: Tensor, name: str) -> None:
    """Raise ValueError if a placement of `tensor`, called `name` in the message, is neither sharded nor replicated."""
    if is_sharded(tensor):
        for placement in tensor.placements:  # type: ignore[attr-defined]
            if not _is_shard(placement) and not placement.is_replicate():
                raise ValueError(f"{name} is placed as {placement}; only sharded and replicated DTensors are supported")


def place_gradients(params: Sequence[Tensor]) -> None:
    """Give every DTensor gradient the placements of its parameter, by communication between its ranks.

    Tensor parallelism leaves some gradients replicated (an embedding sharded by rows), and others as parts of a sum (a
    norm that every rank applies to some of the tokens).
    """
    for param in params if not {*map(type, params)} <= _PLAIN else ():
        grad: Any = param.grad
        if is_sharded(param) and is_sharded(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
            with torch.no_grad():
                param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]


def shard_length(tensor: Any, dim: int) -> int:
    """Return the largest length that a rank holds of dimension `dim`; it is the same on all ranks."""
    length: int = tensor.shape[dim]
    for mesh_dim in _mesh_dims(tensor, dim):
        length = -(-length // tensor.device_mesh.size(mesh_dim))
    return length


def contiguous_runs(tensor: Tensor) -> Iterator[ContiguousRun]:
    """Yield the contiguous runs of this rank's shard of `tensor`, in the shard's order.

    Raises:
        ValueError: the shard does not have the shape that DTensor's placements imply.
    """
    if part := flat_part(tensor):
        if tensor.numel():
            yield ContiguousRun(0, tensor.numel(), part.start)
        return
    shard, shape = local_shard(tensor), tensor.shape
    indices = [_local_indices(tensor, dim) for dim in range(len(shape))] if is_sharded(tensor) else []
    if all(len(held) == size for held, size in zip(indices, shape, strict=False)):  # this rank holds all of it
        if shard.numel():
            yield ContiguousRun(0, shard.numel(), 0)
        return
    if math.prod(map(len, indices)) != shard.numel():
        raise ValueError(
            f"a DTensor of shape {tuple(shape)} placed as {tensor.placements} holds {tuple(shard.shape)} here, not "  # type: ignore[attr-defined]
            f"the expected {tuple(map(len, indices))}"
        )
    # All dimensions after the last sharded one are held in full, so they belong to the same run.
    last_sharded = max(dim for dim, size in enumerate(shape) if len(indices[dim]) < size)
    width = math.prod(shape[last_sharded + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last_sharded)]
    local_start = 0
    for outer in product(*(held.tolist() for held in indices[:last_sharded])):
        row_start = sum(index * stride for index, stride in zip(outer, strides, strict=True))
        for run in _consecutive_runs(indices[last_sharded]):
            yield ContiguousRun(local_start, run.length * width, row_start + run.global_start * width)
            local_start += run.length * width


def checkpointable(tensor: Any) -> Any:
    """Return a tensor with the same memory that torch.distributed.checkpoint saves and loads correctly.

    torch describes the shard of every DTensor as one block of the full tensor. With strided placements, such as those
    of fused weights under tensor parallelism, a shard consists of several blocks.

    Args:
        tensor: a DTensor; other objects are returned as they are, as are DTensors without strided placements.
    """
    if not is_sharded(tensor) or all(not hasattr(p, "split_factor") for p in tensor.placements) or not tensor.dim():
        return tensor
    shard = local_shard(tensor.detach())
    if not shard.numel():
        return tensor
    blocks = shard_layout(tensor).blocks
    offsets = [tuple(each.start for each in place) for _, place in blocks]
    return dtensor_of_blocks([shard[local] for local, _ in blocks], offsets, tensor)


def global_places(tensor: Tensor, places: Tensor) -> Tensor:
    """Return the indices in the full tensor of elements at `places`, int64, in this rank's flattened part of `tensor`.

    Places beyond its end, such as padding, get meaningless indices. The result may be `places` itself.
    """
    runs = list(contiguous_runs(tensor))
    shifts = [run.global_start - run.local_start for run in runs] or [0]
    if len(runs) < 2:
        return places + shifts[0] if shifts[0] else places
    ends = torch.tensor([run.local_start + run.length for run in runs], dtype=torch.int64, device=places.device)
    of_runs = torch.tensor(shifts, dtype=torch.int64, device=places.device)
    return places + of_runs[torch.searchsorted(ends, places, right=True).clamp(max=len(runs) - 1)]


def _is_shard(placement: Any) -> bool:
    # Strided sharding (tensor parallel before data parallel) is not a `Shard` in every version of torch.
    return placement.is_shard() or hasattr(placement, "split_factor")


def _mesh_dims(tensor: Any, dim: int | None = None) -> tuple[int, ...]:
    """Return the mesh dimensions over which `tensor`, or its dimension `dim`, is sharded; none for a plain tensor."""
    placements = enumerate(tensor.placements) if is_sharded(tensor) else ()
    sharded = None if dim is None else dim % len(tensor.shape)
    return tuple(k for k, placement in placements if _is_shard(placement) and sharded in (None, placement.dim))


def _local_indices(tensor: Any, dim: int, coordinate: Sequence[int] | None = None) -> Tensor:
    """Return the indices of dimension `dim` that a rank (by default, this one) holds, ascending.

    DTensor shards as `torch.chunk` splits.
    """
    coordinate = tensor.device_mesh.get_coordinate() if coordinate is None else coordinate
    indices = torch.arange(tensor.shape[dim], device="cpu")
    for mesh_dim in _mesh_dims(tensor, dim):
        ranks, rank = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        chunks = torch.chunk(indices, ranks * int(getattr(tensor.placements[mesh_dim], "split_factor", 1)))
        indices = torch.cat([indices[:0], *chunks[rank::ranks]])
    return indices


def _consecutive_runs(indices: Tensor) -> Iterator[ContiguousRun]:
    """Yield the runs of consecutive numbers in an ascending tensor: their places in it, and their first numbers."""
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(indices)], strict=True) if len(indices) else ():
        yield ContiguousRun(begin, end - begin, int(indices[begin]))
