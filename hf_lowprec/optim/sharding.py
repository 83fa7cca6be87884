"""Shards: which elements of the full tensor this rank holds, and conversions between shard and full tensor.

An element's random bits depend on its index in the full tensor (row-major), so a rank has to know the indices of its
elements, whichever dimensions are sharded and however unevenly. Shards are those of DTensors, or parts of flattened
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
        shape: of the shard.
        blocks: which part of the shard is which part of the full tensor, as indices; strided placements have several.
            Those of a 1-D shard are indices of the flattened tensor.
    """

    shape: torch.Size
    blocks: list[tuple[tuple[slice, ...], tuple[slice, ...]]]

    def cut(self, full: Tensor) -> Tensor:
        """The contiguous shard of the tensor `full`."""
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
    """Say which elements of a parameter the 1-D `tensor` holds."""
    setattr(tensor, _FLAT_PART, part)


def flat_part(tensor: Any) -> FlatPart | None:
    """Which elements of a parameter `tensor` holds, if `set_flat_part` has said so."""
    return getattr(tensor, _FLAT_PART, None)


def part_of(tensor: Tensor) -> FlatPart:
    """Which elements of a parameter `tensor` holds, of which `set_flat_part` has said so."""
    part: FlatPart = getattr(tensor, _FLAT_PART)
    return part


def set_replicas(tensors: Iterable[Tensor], group: ProcessGroup, are_equal: Callable[[], bool]) -> None:
    """Say that the ranks of `group` step the same plain `tensors` with the same gradients, as under DDP.

    Args:
        tensors: the parameters.
        group: the ranks.
        are_equal: whether that is so in the coming step.
    """
    for tensor in tensors:
        _REPLICAS[tensor] = Replicas(group, are_equal)


def replicas_of(tensor: Tensor) -> Replicas | None:
    """The ranks that take the coming step of the same plain `tensor`, if this is not the only one."""
    found: Replicas | None = _REPLICAS.get(tensor)
    return found if found is not None and found.group.size() > 1 and found.are_equal() else None


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of the full tensor of which this rank holds a part. That of a parameter under ZeRO 3 is `ds_shape`."""
    part = flat_part(tensor)
    return getattr(tensor, "ds_shape", tensor.shape) if part is None else part.shape


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a `DTensor`, replicated ones included."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor is returned unchanged.

    Waits for communication that has yet to write it.
    """
    return tensor if type(tensor) in _PLAIN else when_written(local_tensors([tensor])[0])


def when_written(shard: Tensor) -> Tensor:
    """`shard` itself; if communication has yet to write it (see `DTensor.to_local`), wait and return what is written.

    Until then, such a shard has the address 0.
    """
    return shard.wait() if hasattr(shard, "wait") else shard


def sharding_of(tensor: Any, dim: int | None = None) -> Sharding | None:
    """The sharding of `tensor`, or of its dimension `dim`; None if every rank holds all of it."""
    dims = _mesh_dims(tensor, dim)
    return Sharding(tensor.device_mesh, dims) if dims else None


def placements_of_mean(tensor: Any, dim: int | None) -> Any:
    """The placements of a mean of the DTensor `tensor` over its dimension `dim`; its own if that is None."""
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
        shape: of the full tensor; that of `like` by default. It may have more or fewer dimensions behind sharded ones.
        mean_over: the dimension over which it is a mean, which every rank has in full.
    """
    if not is_sharded(like):
        return shard
    full = torch.empty(like.shape if shape is None else shape, dtype=shard.dtype, device="meta")
    return dtensor_of_shard(shard, like.device_mesh, placements_of_mean(like, mean_over), full)  # type: ignore[attr-defined]


def shard_layout(tensor: Tensor, coordinate: Sequence[int] | None = None) -> ShardLayout:
    """The layout of the shard of a DTensor on the rank at `coordinate` of its mesh; by default, on this one.

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
    """This rank's contiguous shard of the tensor `full`, sharded like `like`."""
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
    """Give every gradient that is a DTensor the placements of its parameter, by communication between its ranks.

    Tensor parallelism leaves some gradients replicated (of an embedding that is sharded by rows), and others as parts
    of a sum (of a norm that every rank applies to some of the tokens).
    """
    for param in params if not {*map(type, params)} <= _PLAIN else ():
        grad: Any = param.grad
        if is_sharded(param) and is_sharded(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
            with torch.no_grad():
                param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]


def shard_length(tensor: Any, dim: int) -> int:
    """The largest number of elements that a rank holds of dimension `dim`; the same on all ranks."""
    length: int = tensor.shape[dim]
    for mesh_dim in _mesh_dims(tensor, dim):
        length = -(-length // tensor.device_mesh.size(mesh_dim))
    return length


def contiguous_runs(tensor: Tensor) -> Iterator[ContiguousRun]:
    """The contiguous runs of this rank's shard of `tensor`, in the shard's order.

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
    """A tensor of the same memory that torch.distributed.checkpoint saves and loads correctly.

    It describes the shard of every DTensor as one block of the full tensor. With strided placements, as of fused
    weights under tensor parallelism, a shard consists of several.

    Args:
        tensor: a DTensor; anything else is returned as it is, as are DTensors without strided placements.
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
    """The indices in the full tensor of the elements at `places`, int64, of this rank's flattened part of `tensor`.

    Places behind its end, as padding has, get indices without meaning. May return `places` itself.
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
    """The dimensions of the mesh over which `tensor`, or its dimension `dim`, is sharded; none for a plain tensor."""
    placements = enumerate(tensor.placements) if is_sharded(tensor) else ()
    sharded = None if dim is None else dim % len(tensor.shape)
    return tuple(k for k, placement in placements if _is_shard(placement) and sharded in (None, placement.dim))


def _local_indices(tensor: Any, dim: int, coordinate: Sequence[int] | None = None) -> Tensor:
    """The indices of dimension `dim` that a rank holds, ascending; by default, this one.

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
    """The runs of consecutive numbers in an ascending tensor: where they are in it, and the first number."""
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(indices)], strict=True) if len(indices) else ():
        yield ContiguousRun(begin, end - begin, int(indices[begin]))
