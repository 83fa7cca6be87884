"""Patches: the weights that have changed since the last patch, for another process that holds a copy of the model.

A patch is a safetensors file. A tensor of which few weights have changed is stored as `NAME.indices`, ascending int32
places in the flattened tensor, and `NAME.values`, its new weights there: the content of vLLM's `SparseWeightPatch`. A
tensor of which many have changed, or of which changes are not known, is stored whole under its name. Tensors without a
change are left out. The metadata has the versions that a patch leads from and to, and the shapes of sparse tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_lowprec.integrations.carry_low_bits import named_parameters
from hf_lowprec.optim.changed_weights import take_changes
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import global_places, is_sharded, local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer

FORMAT = "hf_lowprec.patch.1"
_INDICES, _VALUES = ".indices", ".values"
_INDEX_BYTES = 4


class WeightPatch(NamedTuple):
    """What `save_weight_patch` has written.

    Attributes:
        changed: number of weights that have changed, or may have.
        weights: number of weights of the model that are trained.
        nbytes: of the file.
    """

    changed: int
    weights: int
    nbytes: int


@without_grad
def save_weight_patch(
    model: nn.Module, optimizer: Any, path: str | os.PathLike[str], *, base: int, target: int
) -> WeightPatch | None:
    """Write the weights that have changed since the last patch; since the optimizer was built, if there was none.

    Under FSDP2 and HSDP, every rank must call this function: rank 0 gathers one tensor at a time and writes. Under DDP,
    every rank should, so that all of them begin anew.

    Args:
        model: the model, with or without the wrappers of accelerate, DDP or `torch.compile`.
        optimizer: built with `track_changes=True`.
        path: of the file.
        base: the version of the weights to which the patch is applied, for example the step of the last patch.
        target: the version to which it leads.

    Returns:
        What was written; None on ranks other than 0.

    Raises:
        ValueError: the optimizer does not track changes, or a tensor has 2³¹ elements or more.
    """
    changes = take_changes(unwrap_optimizer(optimizer))
    writes = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    changed = weights = 0
    for name, param in named_parameters(extract_model_from_parallel(model, keep_torch_compile=False)):
        if param not in changes:
            continue
        count = param.numel()
        if count >= 1 << 31:
            raise ValueError(f"{name} has {count:,} elements, too many for indices of 32 bits")
        places = changes[param]
        known = count if places is None else _sum_over_ranks(param, len(places))
        if places is None or known * (_INDEX_BYTES + param.itemsize) > count * param.itemsize:
            whole = param.full_tensor() if is_sharded(param) else param  # type: ignore[attr-defined]
            if writes:
                tensors[name] = whole.detach().cpu().contiguous()
            changed += known
        elif known:
            indices, values = _gathered(param, places)
            if writes:
                tensors[name + _INDICES], tensors[name + _VALUES] = indices, values
                shapes[name] = list(param.shape)
            changed += len(indices)
        weights += count
    if not writes:
        return None
    metadata = {"format": FORMAT, "base": str(base), "target": str(target), "shapes": json.dumps(shapes)}
    save_file(tensors, path, metadata)
    return WeightPatch(changed, weights, Path(path).stat().st_size)


def _sum_over_ranks(param: Tensor, count: int) -> int:
    """The sum of `count` over the ranks that hold different shards of `param`."""
    sharding = sharding_of(param)
    if sharding is None:
        return count
    return int(sum_over_shards(torch.tensor(count, device=local_shard(param).device), sharding))


def _gathered(param: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of the changed weights of all ranks, on the CPU of rank 0; others get their own.

    Args:
        param: the parameter.
        places: of this rank's, see `take_changes`.
    """
    flat = local_shard(param.detach()).reshape(-1)
    part = global_places(param, places).cpu().int(), flat[places.to(flat.device)].cpu()
    if not is_sharded(param):
        return part
    parts: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(part, parts if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return part
    # Replicas of a shard send the same: each index once.
    indices, order = torch.cat([each for each, _ in parts]).sort(stable=True)
    values = torch.cat([each for _, each in parts])[order]
    first = torch.ones_like(indices, dtype=torch.bool)
    first[1:] = indices[1:] != indices[:-1]
    return indices[first], values[first]


@without_grad
def apply_weight_patch(path: str | os.PathLike[str], weights: Mapping[str, Tensor], *, base: int) -> int:
    """Write the new weights of a patch into copies of the model's tensors. If it does not fit, nothing is changed.

    Args:
        path: of the file.
        weights: contiguous tensors by name, as in `model.state_dict()`, of the version `base`.
        base: their version.

    Returns:
        The version of the weights now.

    Raises:
        ValueError: the file is not a patch, or leads from another version; or a tensor is missing, or has another shape
            or dtype; or an index lies outside of it.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is not a patch of this version: its format is {metadata.get('format')!r}")
        if metadata["base"] != str(base):
            raise ValueError(f"{path} leads from version {metadata['base']}, but the weights have version {base}")
        shapes = json.loads(metadata["shapes"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    whole = {name: tensor for name, tensor in stored.items() if not name.endswith((_INDICES, _VALUES))}
    for name, shape, dtype in [
        *((name, list(tensor.shape), tensor.dtype) for name, tensor in whole.items()),
        *((name, shape, stored[name + _VALUES].dtype) for name, shape in shapes.items()),
    ]:
        target = weights.get(name)
        if target is None or list(target.shape) != shape or target.dtype != dtype or not target.is_contiguous():
            found = "missing" if target is None else f"{target.dtype} of shape {list(target.shape)}"
            raise ValueError(f"{name} is {dtype} of shape {shape} in the patch; among the weights it is {found}")
    for name in shapes:
        indices = stored[name + _INDICES]
        if (indices[1:] <= indices[:-1]).any() or not 0 <= int(indices[0]) <= int(indices[-1]) < weights[name].numel():
            raise ValueError(f"{name}: indices in {path} are not ascending places in the tensor")
    for name, tensor in whole.items():
        weights[name].copy_(tensor)
    for name in shapes:
        places = stored[name + _INDICES].to(weights[name].device, torch.int64)
        weights[name].view(-1)[places] = stored[name + _VALUES].to(weights[name].device)
    return int(metadata["target"])
