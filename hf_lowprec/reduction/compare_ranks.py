"""Check that all ranks train with the same settings, and that replicas are still identical.

Ranks exchange digests; the settings, or a checksum per tensor, are exchanged only if the digests differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_lowprec.reduction.collectives import gather_if_different
from hf_lowprec.reduction.private_torch_apis import meshes_beside, names_ignored_by_ddp
from hf_lowprec.rounding import dtype_name

_SHOWN = 3
"""The largest number of differences, and of ranks with one value, that a message names."""
_MISSING = "missing"
_WEIGHT_STEP = 2 * 0x1E3779B97F4A7C15
"""The difference between consecutive weights of a checksum: twice ⌊2⁶⁴ / golden ratio⌋ modulo 2⁶³."""


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Check that replicas hold identical weights and optimizer states. Every rank must call it.

    The replicas of each shard are compared under HSDP, and wherever a parameter uses only some dimensions of a device
    mesh. Under FSDP2 without replicas, there are no weights to compare. Parameters that DDP or FSDP2 was told to ignore
    are skipped. The settings of `optimizer` are always compared.

    Args:
        model: the model, wrapped or not.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Raises:
        RuntimeError: settings of the optimizer or replicas differ. Raised on every rank of the group; the message
            names the first setting or tensor that differs, and the ranks on which it does.
    """
    if not dist.is_initialized():
        return
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper hides its class and settings
    if optimizer is not None:
        check_same_settings(
            optimizer_settings(optimizer, {param: name for name, param in synchronized_parameters(model)})
        )
    difference = find_replica_difference(synchronized_parameters(model), optimizer)
    if difference is not None:
        raise RuntimeError(difference)


def find_replica_difference(
    parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> str | None:
    """Compare parameters that should be identical on all replicas by their checksums. Every rank must call it.

    Args:
        parameters: name and parameter, in the same order on all ranks.
        optimizer: its states of these parameters are compared as well.

    Returns:
        A description of the first difference, on every rank of the group in which it was found; None if there is none.
    """
    by_group: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, param in parameters:
        states = {} if optimizer is None else optimizer.state.get(param, {})
        tensors = {name: param} | {f"{name} ({key})": state for key, state in states.items()}
        for found, tensor in tensors.items():
            for group in _replica_groups(tensor) if isinstance(tensor, Tensor) else ():
                by_group[group].append((found, tensor))
    # All groups are compared, even after a difference: the ranks of another group wait for this one.
    differences = [_compare_in_group(group, held) for group, held in by_group.items() if group.size() > 1]
    return next(filter(None, differences), None)


def _compare_in_group(group: dist.ProcessGroup, tensors: list[tuple[str, Tensor]]) -> str | None:
    """Describe the first difference between the tensors of the ranks of `group`; None if there is none."""
    device = next((tensor.device for _, tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    checksums = torch.stack([checksum(tensor).to(device) for _, tensor in tensors]).tolist()
    names = [name for name, _ in tensors]
    by_rank = gather_if_different(list(zip(names, checksums, strict=True)), group)
    if by_rank is None:
        return None
    names_by_rank = [[name for name, _ in of_rank] for of_rank in by_rank]
    if any(of_rank != names for of_rank in names_by_rank):
        missing = sorted(set.union(*map(set, names_by_rank)) - set.intersection(*map(set, names_by_rank)))
        return f"replicas differ: {', '.join(missing[:3]) or 'the same order of tensors'} is not on every rank"
    different = [k for k, of_tensor in enumerate(zip(*by_rank, strict=True)) if len(set(of_tensor)) > 1]
    first = different[0]
    ranks = dist.get_process_group_ranks(group)
    wrong = [str(rank) for rank, held in zip(ranks, by_rank, strict=True) if held[first] != by_rank[0][first]]
    return (
        f"replicas differ: {names[first]} on rank {', '.join(wrong)} differs from that on rank {ranks[0]} "
        f"({len(different)} of {len(tensors)} tensors differ)"
    )


def synchronized_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and parameters that DDP and FSDP2 synchronize or shard, without those they were told to ignore."""
    ignored: set[Tensor] = set()
    for module in model.modules():
        names = names_ignored_by_ddp(module)
        if names:  # a tied parameter is ignored only if all of its names are
            named = list(module.named_parameters(remove_duplicate=False))
            ignored |= {p for name, p in named if name in names} - {p for name, p in named if name not in names}
        if isinstance(module, FSDPModule):  # parameters that are not DTensors were named in `ignored_params`
            ignored |= {param for param in module.parameters() if not isinstance(param, DTensor)}
    return ((name, param) for name, param in model.named_parameters() if param not in ignored)


def _replica_groups(tensor: Tensor) -> Iterable[dist.ProcessGroup]:
    """Return the groups whose ranks all hold the same part of `tensor` as this rank."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return [dist.group.WORLD]  # type: ignore[list-item]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    along = [mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_replicate()]
    return along + meshes_beside(mesh)


def checksum(tensor: Tensor) -> Tensor:
    """Compute the checksum of a tensor's elements, in the order of their indices; for a sharded tensor, the local part.

    With the bit pattern x_i at position i, it is Σ x_i · w_i modulo 2⁶⁴, where w_i = 2·G·i + 1 and G is ⌊2⁶⁴ / golden
    ratio⌋ without its highest bit, which 2·G loses anyway. Every weight is odd and patterns have at most 32 bits, so a
    change of any one element changes the sum. The weights differ, so exchanging two different elements changes it too.

    Returns:
        An int64 scalar on the tensor's device; for a tensor on the meta device, which holds nothing, 0 on the CPU.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    patterns, chunk = _bit_patterns(local), _chunk_size(local.device)
    total = torch.zeros((), dtype=torch.int64, device=patterns.device)
    weights = torch.arange(min(patterns.numel(), chunk), device=patterns.device) * _WEIGHT_STEP + 1
    for number, part in enumerate(patterns.split(chunk)):
        values = part.to(torch.int64)
        # A chunk's weights are those of the first chunk plus a constant. int64 is computed modulo 2⁶⁴.
        total += (values * weights[: part.numel()]).sum() + values.sum() * (number * chunk) * _WEIGHT_STEP
    return total


def _bit_patterns(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers of at most 32 bits; 16-bit elements in pairs where their number is even."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() == 2 and flat.storage_offset() % 2:
        flat = flat.clone()  # pairs must begin at even offsets
    integers = {1: torch.int8, 2: torch.int16 if flat.numel() % 2 else torch.int32}
    return flat.view(integers.get(flat.element_size(), torch.int32))


def _chunk_size(device: torch.device) -> int:
    """Return how many patterns of 8 bytes to read at once: they fit a CPU's cache; a GPU needs launches per chunk."""
    return 1 << 16 if device.type == "cpu" else 1 << 22


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings. Every rank must call it.

    Args:
        settings: values by name, as `to_plain_value` returns them.

    Raises:
        RuntimeError: settings differ. Raised on every rank; the message gives the names and values that differ, and
            the ranks that have them.
    """
    by_rank = gather_if_different(dict(settings))
    if by_rank is None:
        return
    differences = []
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        values = [of_rank.get(name, _MISSING) for of_rank in by_rank]
        if all(value == values[0] for value in values):
            continue
        ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(_MISSING if value is _MISSING else repr(value), []).append(rank)
        first, *rest = (f"{value} on {_describe_ranks(having)}" for value, having in ranks.items())
        differences.append(f"{name} is {', '.join(rest[:_SHOWN])} and {first}")
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise RuntimeError(
            f"ranks train with different settings: {'; '.join(differences[:_SHOWN])}{more}. Replicas would "
            "diverge; use the same settings on every rank"
        )


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Return the names, dtypes, shapes and order of a model's parameters, before DDP or FSDP2 wraps it."""
    cls = type(model).__name__
    return {
        f"parameter {k} of {cls}": _describe_parameter(name, param) + ("" if param.requires_grad else ", frozen")
        for k, (name, param) in enumerate(model.named_parameters())
    }


def optimizer_settings(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return an optimizer's class, all settings of its groups, and the order of its parameters.

    Args:
        optimizer: any optimizer with torch's interface.
        names: qualified names of the parameters.
    """
    cls = type(optimizer)
    settings: dict[str, Any] = {
        "the optimizer": f"{cls.__module__}.{cls.__qualname__}",
        "skip_nonfinite": getattr(optimizer, "skip_nonfinite", None),
        "gradient_release": getattr(optimizer, "gradient_release", None),
        "clip": getattr(optimizer, "clip", None),
        "the number of param_groups": len(optimizer.param_groups),
    }
    for k, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                settings[f"param_groups[{k}][{key!r}]"] = to_plain_value(value)
        for i, param in enumerate(group["params"]):
            settings[f"param_groups[{k}]['params'][{i}]"] = _describe_parameter(names.get(param, "a parameter"), param)
    return settings


def to_plain_value(value: Any) -> Any:
    """Convert a setting to built-in objects, which compare, pickle and print the same in every process.

    Objects of other types are represented by the name of their class.
    """
    if isinstance(value, Tensor):
        return to_plain_value(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return value.type  # the index differs between ranks
    if isinstance(value, Mapping):
        return {str(key): to_plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_value(item) for item in value]
    return type(value).__qualname__


def _describe_parameter(name: str, param: Tensor) -> str:
    return f"{name}: {dtype_name(param.dtype)} {tuple(param.shape)}"


def _describe_ranks(ranks: list[int]) -> str:
    """Name the first few of `ranks`, and the number of the others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
