"""The states of a parameter: their dtypes and shapes, the keys and forms in which they are stored, and new ones.

A state in 8 bits is stored as two tensors: its codes, and a scale for each block of `BLOCK` elements of a row. Blocks
never cross rows, so that no shard of whole rows cuts one, and every sharding gives the same bits. A step decodes and
encodes elements as it loads and stores them, see `step/fused_step.py`; `value_in` and `stored_as` do so for whole
states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.sharding import (
    dtensor_like,
    flat_part,
    full_shape,
    is_sharded,
    local_shard,
    placements_of_mean,
    shard_length,
)
from hf_lowprec.rounding import State, dtype_name
from hf_lowprec.rounding.block_floats import BLOCK, decode, encode, scale_shape
from hf_lowprec.rounding.fp32_math import SMALLEST_NORMAL
from hf_lowprec.rounding.low_bits import chunk_size
from hf_lowprec.rounding.modes import CODE_SUFFIX, LOW_BITS_STATES, SCALE_SUFFIX, StoredState


def state_tensors(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, existing: Mapping[str, Any] | None = None
) -> list[StoredState]:
    """Return the state tensors that `param` has in `group`, in the order in which they are stored.

    Existing states have their own dtype, others the dtype that the group asks for.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group.
        param: the parameter.
        existing: the states that exist; None means those of `optimizer`.

    Raises:
        ValueError: a state would be stored in 8 bits, and the sharding of `param` cuts blocks.
    """
    if existing is None:
        existing = optimizer.state.get(param, {})
    tensors = []
    for state in optimizer.stored_states(group, param):
        dtype = dtype_in(existing, state.name) or new_state_dtype(state, group, param)
        tensors.append(StoredState.of(state, dtype, group["state_rounding"]))
        if dtype == torch.int8:
            _check_blocks(param)
            name, of = state.name + SCALE_SUFFIX, state.name
            tensors.append(StoredState(name, state.role, accumulates=False, dtype=torch.uint8, scale_of=of))
    return tensors


def _requested_dtype(state: State, group: ParamGroup, param: Tensor) -> torch.dtype:
    """Return the dtype that `group` asks for `state` of `param`."""
    if state.dtype is not None or param.dtype == torch.float32:
        return state.dtype or torch.float32
    requested = group["state_dtype"]
    return (requested.get(state.name) if isinstance(requested, Mapping) else requested) or torch.bfloat16


def new_state_dtype(state: State, group: ParamGroup, param: Tensor) -> torch.dtype:
    """Return the dtype of a new state of `param`: what `group` asks for, or BF16 instead of unsupported 8 bits."""
    dtype = _requested_dtype(state, group, param)
    return torch.bfloat16 if dtype == torch.int8 and why_not_8_bits(state, param) else dtype


def why_not_8_bits(state: State, param: Tensor) -> str | None:
    """Explain why `state` of `param` cannot be stored in 8 bits; return None if it can."""
    if not state.accumulates:
        return f"{state.name} does not average over steps"
    shape, part = full_shape(param), flat_part(param)
    is_cut = part is not None and any(bound % BLOCK for bound in part.bounds)
    if len(shape) > 1 and shape[-1] % BLOCK == 0 and not is_cut:
        return None
    rows = "rows" if part is None else "rows, or a rank's part of them,"
    return f"{rows} are not multiples of {BLOCK} elements"


def stays_in_bf16(optimizer: Algorithm, group: ParamGroup, param: Tensor) -> list[str]:
    """Return the reason for each state of `param` that `group` wants in 8 bits but that is stored in BF16."""
    states = optimizer.stored_states(group, param)
    wanted = (state for state in states if _requested_dtype(state, group, param) == torch.int8)
    return [reason for state in wanted if (reason := why_not_8_bits(state, param)) is not None]


def _check_blocks(param: Tensor) -> None:
    """Raise ValueError if a rank's part of a row of `param` is not made of whole blocks."""
    length = shard_length(param, -1)
    if is_sharded(param) and length % BLOCK != 0:
        raise ValueError(
            f"state_dtype=int8: a parameter of shape {tuple(param.shape)} is sharded as {param.placements}, "  # type: ignore[attr-defined]
            f"{length} elements of a row per rank, which cuts blocks of {BLOCK}; shard another dimension or over fewer "
            "ranks, or use state_dtype=bfloat16 for its param group"
        )


# The forms in which states are stored.


def storage_keys(name: str, keys: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the state `name` in a parameter's entry: its own, or those of its codes and scales."""
    coded = name + CODE_SUFFIX, name + SCALE_SUFFIX
    return coded if coded[0] in keys else (name,)


def dtype_in(state: Mapping[str, Any], name: str) -> torch.dtype | None:
    """Return the dtype in which the entry `state` of a parameter stores the state `name`; None if it does not."""
    stored = state.get(storage_keys(name, state.keys())[0])
    return None if stored is None else stored.dtype


def value_in(state: Mapping[str, Any], name: str) -> Tensor:
    """Return the values of a whole state: as stored, or in FP32 if it is stored in 8 bits.

    Args:
        state: a parameter's entry in `optimizer.state` or in a state dict, or a part of it. Tensors may be DTensors.
        name: the name of the state.
    """
    stored = [state[key] for key in storage_keys(name, state.keys())]
    if len(stored) == 1:
        value: Tensor = stored[0]
        return value
    codes, scales = (local_shard(tensor).int() for tensor in stored)
    return dtensor_like(decode(codes, scales.repeat_interleave(BLOCK, dim=-1), is_nonnegative(name)), stored[0])


def stored_as(value: Tensor, dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    """Convert a whole state to its stored form, by key; rounded to nearest.

    Args:
        value: floating-point tensor. For 8 bits, its rows, or this rank's part of them, consist of blocks.
        dtype: the dtype in which it is stored.
        name: its name.
    """
    if dtype != torch.int8:
        return {name: value.to(dtype)}
    shard = local_shard(value)
    code = torch.empty(shard.shape, dtype=torch.int8, device=shard.device)
    scale = torch.empty(scale_shape(shard.shape), dtype=torch.uint8, device=shard.device)
    size = chunk_size(shard.device)
    parts = (shard.reshape(-1).split(size), code.view(-1).split(size), scale.view(-1).split(size // BLOCK))
    for part, codes, scales in zip(*parts, strict=True):
        middle = torch.full_like(part, 1 << 15, dtype=torch.int32)
        of_elements = encode(part.float(), middle, is_nonnegative(name))
        codes.copy_(of_elements[0].to(torch.uint8).view(torch.int8))
        scales.copy_(of_elements[1][::BLOCK])
    return {
        name + CODE_SUFFIX: dtensor_like(code, value),
        name + SCALE_SUFFIX: dtensor_like(scale, value, scale_shape(value.shape)),
    }


def is_nonnegative(name: str) -> bool:
    """Return whether the state `name` is never negative; for states whose algorithm is not known."""
    return name.endswith("_sq")


def rounded_to_nearest(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert states to the dtypes that new states of `param` have in `group`.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group.
        param: the parameter.
        values: floating-point tensors by name. Compensations, and values other than tensors of the parameter's shape,
            are returned as they are.
    """
    known = {state.name: state for state in optimizer.stored_states(group, param)}
    states: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != param.shape or name in ("step", *LOW_BITS_STATES):
            states[name] = value
        else:
            state = known.get(name, State(name, role=0, accumulates=False))
            states |= stored_as(value, new_state_dtype(state, group, param), name)
    return states


def in_own_dtypes(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, saved: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Convert the states of `param` that were not saved in the dtype that new states have in `group`.

    Conversions to fewer bits round to nearest, without random bits, so that every sharding gets the same bits. A
    compensation or remainder is a part of the weight, so it stays as it is.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group, with the `state_dtype` to use.
        param: the parameter.
        saved: its entry in the state dict.

    Returns:
        The entry with converted states, and each conversion in words.

    Raises:
        ValueError: a state would be stored in 8 bits, and the sharding of `param` cuts blocks.
    """
    converted, changes = dict(saved), []
    for state in optimizer.states(group):
        before, after = dtype_in(saved, state.name), new_state_dtype(state, group, param)
        if before in (None, after):
            continue
        changes.append(f"{state.name} from {dtype_name(before)} to {dtype_name(after)}")
        if after == torch.int8:
            _check_blocks(param)
        for key in storage_keys(state.name, saved.keys()):
            del converted[key]
        converted |= stored_as(value_in(saved, state.name), after, state.name)
    return converted, changes


def convert_factored(optimizer: Algorithm, group: ParamGroup, param: Tensor, state: dict[str, Any]) -> list[str]:
    """Turn states that are factored in `group` into means over rows and columns, and means into states that are not.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group, with the setting `factored` to use.
        param: the parameter.
        state: its entry in `optimizer.state` or in a state dict, which is changed.

    Returns:
        Each conversion in words.
    """
    changes: list[str] = []
    if "factored" not in group:  # no choice
        return changes
    own = {stored.name: stored for stored in optimizer.stored_states(group, param)}
    for whole in optimizer.states({**group, "factored": True}):
        names, saved = whole.factored or (), storage_keys(whole.name, state.keys())
        if saved[0] in state and not own.keys().isdisjoint(names):
            value, changes = value_in(state, whole.name), [*changes, f"{whole.name} to means over rows and columns"]
            new = {}
            for name in names:
                dim = own[name].mean_over or 0
                total = _placed_as(value.sum(dim, True, dtype=torch.float64), param, own[name])
                new[name] = (total / max(param.shape[dim], 1)).float()
        elif names and state.keys() >= {*names} and whole.name in own:
            (row, column), changes = (state[name] for name in names), [*changes, f"{whole.name} from its means"]
            value = (row / row.mean(-2, True, dtype=torch.float64).clamp(min=SMALLEST_NORMAL)).float() * column
            new = stored_as(_placed_as(value, param, whole), new_state_dtype(whole, group, param), whole.name)
            saved = names
        else:
            continue
        for key in saved:
            del state[key]
        state.update(new)
    return changes


def _placed_as(value: Tensor, param: Tensor, state: State) -> Tensor:
    """Return `value` as a DTensor, if `param` is one, with the placements of this state of `param`."""
    if not is_sharded(value):
        return value
    return value.redistribute(placements=placements_of_mean(param, state.mean_over))  # type: ignore[attr-defined]


# New states.

PAGE = 4096
"""The number of bytes after which the last twelve bits of an address repeat."""
SMALLEST = 16 * PAGE
"""The smallest state, in bytes, that gets a page of extra memory."""
_LINE = 64


def zeros_apart(
    param: Tensor, state: StoredState, position: int, count: int, device: torch.device | None = None
) -> Tensor:
    """Create a state: contiguous zeros, distributed like `param`.

    On a CPU, a weight and its states lie at different offsets from page boundaries. A load waits for an earlier store
    in flight if the last twelve bits of their addresses are equal, even if they are pages apart (AMD, Software
    Optimization Guide, publication 25112, section 5.5, "False Dependencies"; Intel calls it 4-KByte aliasing). The C
    library places each of several large tensors 64 bytes further into a page than the one before, so a step would load
    from one state at the offset where it has just stored to another.

    Args:
        param: the parameter.
        state: the new state.
        position: the position among the parameter's states, from 0.
        count: the number of its states; they divide the page that begins at the weight.
        device: the device of the zeros; None means the parameter's.
    """
    part, dtype = local_shard(param), state.dtype
    device = device or part.device
    if state.scale_of is not None or state.mean_over is not None:
        zeros = torch.zeros(state.shape_for(part.shape), dtype=dtype, device=device)
        return dtensor_like(zeros, param, state.shape_for(param.shape), state.mean_over)
    if device.type != "cpu" or part.numel() * dtype.itemsize < SMALLEST:
        return torch.zeros_like(param, dtype=dtype, device=device, memory_format=torch.contiguous_format)
    memory = torch.zeros(part.numel() + PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    target = part.data_ptr() + PAGE * (position + 1) // (count + 1)
    first = (target - memory.data_ptr()) % PAGE // _LINE * _LINE // dtype.itemsize
    zeros = memory[first : first + part.numel()].view(part.shape)
    # torch cannot copy a DTensor whose shard has an offset in its storage, so shards have no offset. A plain tensor
    # keeps its offset, which is saved with it, so that loaded states are placed apart as well.
    return dtensor_like(from_dlpack(zeros), param) if is_sharded(param) else zeros


def copy_apart(state: Tensor) -> Tensor:
    """Return a contiguous copy of a state, at the same offset in new memory; see `zeros_apart`."""
    first = state.storage_offset()
    if is_sharded(state) or first >= PAGE:  # with a larger offset, `state` is a part of other memory
        return state.clone(memory_format=torch.contiguous_format)
    return state.new_empty(first + state.numel())[first:].view(state.shape).copy_(state)
