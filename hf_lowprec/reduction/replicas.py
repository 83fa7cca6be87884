"""Are replicas still the same? A checksum per tensor is exchanged, so the check costs one read and a few bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_lowprec.reduction.settings import gather_where_different

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""What torch leaves on a model whose DDP is told to leave parameters alone: their names."""
_ODD = 0x1E3779B97F4A7C15


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Compare weights and optimizer states between the ranks that should hold the same; every rank must call it.

    Under HSDP the replicas of each shard are compared. FSDP2 without replicas has nothing to compare. Parameters that
    DDP or FSDP2 is told to ignore are left out.

    Args:
        model: the model, wrapped or not.
        optimizer: its optimizer, or accelerate's wrapper of it.

    Raises:
        RuntimeError: on every rank of the group, with the name of the first tensor that differs and the ranks on which
            it does.
    """
    if not dist.is_initialized():
        return
    found = difference_of_replicas(with_states(common_parameters(model), unwrapped(optimizer)))
    if found is not None:
        raise RuntimeError(found)


def difference_of_replicas(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """What differs among tensors with names that ranks should have in common; every rank must call it.

    Returns:
        The first difference in words, on every rank of the group in which it was found; None without one.
    """
    groups: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        for group in _replicating(tensor):
            groups[group].append((name, tensor))
    # All of them, whatever is found in one: the ranks of another group wait for this one.
    found = [_difference(group, held) for group, held in groups.items() if group.size() > 1]
    return next(filter(None, found), None)


def _difference(group: dist.ProcessGroup, tensors: list[tuple[str, Tensor]]) -> str | None:
    device = next((tensor.device for _, tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    sums = torch.stack([checksum(tensor).to(device) for _, tensor in tensors]).tolist()
    every = gather_where_different([(name, total) for (name, _), total in zip(tensors, sums, strict=True)], group)
    if every is None:
        return None
    names = [[name for name, _ in held] for held in every]
    if any(held != names[0] for held in names):
        missing = sorted(set.union(*map(set, names)) - set.intersection(*map(set, names)))
        return f"replicas differ: {', '.join(missing[:3]) or 'the order of tensors'} is not on every rank"
    different = [k for k, found in enumerate(zip(*every, strict=True)) if len(set(found)) > 1]
    first = different[0]
    ranks = dist.get_process_group_ranks(group)
    wrong = [str(rank) for rank, held in zip(ranks, every, strict=True) if held[first] != every[0][first]]
    return (
        f"replicas differ: {names[0][first]} on rank {', '.join(wrong)} is not that of rank {ranks[0]} "
        f"({len(different)} of {len(tensors)} tensors differ)"
    )


def checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device that changes with any one element, and with their order.

    Of a tensor on the meta device, which holds nothing, it is 0 on the CPU.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().view(-1)
    if flat.element_size() == 2 and flat.storage_offset() % 2:
        flat = flat.clone()  # pairs are read at even offsets
    # At most 32 bits, which an odd factor keeps apart modulo 2^64.
    pattern = {1: torch.int8, 2: torch.int16 if flat.numel() % 2 else torch.int32}
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    patterns, size = flat.view(pattern.get(flat.element_size(), torch.int32)), _piece_size(flat.device)
    factors = _factors(min(patterns.numel(), size), flat.device)
    for number, piece in enumerate(patterns.split(size)):
        values = piece.to(torch.int64)
        total += (values * factors[: piece.numel()]).sum() + values.sum() * _signed(number * size)
    return total


def _piece_size(device: torch.device) -> int:
    """Patterns read at a time, at 8 bytes each: they fit a CPU's cache; elsewhere each piece costs several launches."""
    return 1 << 16 if device.type == "cpu" else 1 << 22


def _factors(count: int, device: torch.device) -> Tensor:
    """Of the values of a first piece; those of a later one, and its place times `_ODD`, are the same modulo 2^64."""
    return torch.arange(count, device=device) * _signed(1) + 1


def _signed(place: int) -> int:
    """`2 · _ODD · place` modulo 2^64, as an int64."""
    factor = 2 * _ODD * place % 2**64
    return factor - 2**64 if factor >= 2**63 else factor


def common_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, with names, that ranks have in common or share among them, without each rank's own."""
    own: set[Tensor] = set()
    for module in model.modules():
        ignored = getattr(module, _IGNORED_BY_DDP, ())
        if ignored:  # a tied parameter by all of its names
            named = list(module.named_parameters(remove_duplicate=False))
            own |= {param for name, param in named if name in ignored} - {p for name, p in named if name not in ignored}
        if isinstance(module, FSDPModule):  # those that are no DTensors were named in `ignored_params`
            own |= {param for param in module.parameters() if not isinstance(param, DTensor)}
    return ((name, param) for name, param in model.named_parameters() if param not in own)


def with_states(
    parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Tensor]]:
    """`parameters` with names, each followed by the tensors that `optimizer` keeps of it."""
    for name, param in parameters:
        yield name, param
        states = {} if optimizer is None else optimizer.state.get(param, {})
        yield from ((f"{name} ({key})", value) for key, value in states.items() if isinstance(value, Tensor))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, or `optimizer` itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _replicating(tensor: Tensor) -> Iterable[dist.ProcessGroup]:
    """The groups whose ranks all hold what this rank holds of `tensor`."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return [dist.group.WORLD]  # type: ignore[list-item]
    return [
        tensor.device_mesh.get_group(dim)  # type: ignore[attr-defined]
        for dim, placement in enumerate(placements)
        if placement.is_replicate()
    ]
