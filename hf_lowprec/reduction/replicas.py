"""Are replicas still the same? A checksum per tensor is exchanged, so the check costs one read and a few bytes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PIECE = 1 << 16
_ODD = 0x1E3779B97F4A7C15


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Compare weights and optimizer states between the ranks that should hold the same; every rank must call it.

    Of sharded tensors (FSDP2) those parts are compared that HSDP replicates; without replicas there is nothing to do.

    Args:
        model: the model, wrapped or not.
        optimizer: its optimizer, or accelerate's wrapper of it.

    Raises:
        RuntimeError: on every rank of the group, with the name of the first tensor that differs and the ranks on which
            it does.
    """
    if not dist.is_initialized():
        return
    groups: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in _named_tensors(model, getattr(optimizer, "optimizer", optimizer)):
        for group in _replicating(tensor):
            groups[group].append((name, tensor))
    for group, tensors in groups.items():
        if group.size() > 1:
            _compare(group, tensors)


def _compare(group: dist.ProcessGroup, tensors: list[tuple[str, Tensor]]) -> None:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, [name for name, _ in tensors], group=group)
    if any(names != every[0] for names in every):
        held = list(map(set, every))
        missing = sorted(set.union(*held) - set.intersection(*held))
        raise RuntimeError(f"replicas differ: {', '.join(missing[:3]) or 'the order of tensors'} is not on every rank")
    device = tensors[0][1].device
    own = torch.stack([checksum(tensor).to(device) for _, tensor in tensors])
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    others = torch.stack(gathered).cpu()
    differs = others != others[0]
    if differs.any():
        first = int(differs.any(dim=0).nonzero()[0])
        ranks = dist.get_process_group_ranks(group)
        wrong = [ranks[int(place)] for place in differs[:, first].nonzero()]
        raise RuntimeError(
            f"replicas differ: {tensors[first][0]} on rank {', '.join(map(str, wrong))} is not that of rank {ranks[0]} "
            f"({int(differs.any(dim=0).sum())} of {len(tensors)} tensors differ)"
        )


def checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device that changes with any one element, and with their order."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().view(-1)
    if flat.element_size() == 2 and flat.storage_offset() % 2:
        flat = flat.clone()  # pairs are read at even offsets
    # At most 32 bits, which an odd factor keeps apart modulo 2^64.
    pattern = {1: torch.int8, 2: torch.int16 if flat.numel() % 2 else torch.int32}
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # 8 bytes per pattern are needed for a piece at a time only.
    for number, piece in enumerate(flat.view(pattern.get(flat.element_size(), torch.int32)).split(_PIECE)):
        values = piece.to(torch.int64)
        total += (values * _factors(piece.device)[: piece.numel()]).sum() + values.sum() * _signed(number * _PIECE)
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Of the values of a first piece; those of a later one, and its place times `_ODD`, are the same modulo 2^64."""
    return torch.arange(_PIECE, device=device) * _signed(1) + 1


def _signed(place: int) -> int:
    """`2 · _ODD · place` modulo 2^64, as an int64."""
    factor = 2 * _ODD * place % 2**64
    return factor - 2**64 if factor >= 2**63 else factor


def _named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        yield name, param
        state = {} if optimizer is None else optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{name} ({key})", value


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
