"""The state tensors of a parameter: their names, dtypes and shapes.

States in 8 bits have a scale for each block of `BLOCK` elements of a row, in a tensor of their own. Blocks never cross
rows, so that no shard of whole rows cuts one, and every sharding gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.sharding import dtensor_like, flat_part, full_shape, is_sharded, local_shard, shard_length
from hf_lowprec.optim.state.states_in_8_bits import (
    CODE_SUFFIX,
    SCALE_SUFFIX,
    decoded_states,
    dtype_in,
    encoded,
    key_of,
    scale_shape,
)
from hf_lowprec.rounding import MODES, State, dtype_name
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.rounding.modes import LOW_BITS_STATES


class StateTensor(NamedTuple):
    """A state of a parameter as it is stored.

    Attributes:
        state: its name, its random bits, and how it is rounded.
        dtype: its dtype.
        shape: its full shape.
    """

    state: State
    dtype: torch.dtype
    shape: torch.Size

    @property
    def key(self) -> str:
        """Its key in `optimizer.state[param]`."""
        return key_of(self.state.name, self.dtype)


def state_tensors(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, existing: Mapping[str, Any] | None = None
) -> list[StateTensor]:
    """The state tensors that `param` has in `group`, in the order in which they are stored.

    States that exist have their dtype, others that which the group asks for.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group.
        param: the parameter.
        existing: the states that exist; None means those of `optimizer`.

    Raises:
        ValueError: a state is to be stored in 8 bits, and `param` is sharded such that blocks are cut.
    """
    if existing is None:
        existing = optimizer.state.get(param, {})
    tensors = []
    for state in optimizer.stored_states(group, param):
        dtype = dtype_in(existing, state.name) or new_state_dtype(state, group, param)
        tensors.append(StateTensor(state, dtype, state.shape_for(param.shape)))
        if dtype == torch.int8:
            _check_blocks(param)
            scale = State(state.name + SCALE_SUFFIX, state.role, averages=False, dtype=torch.uint8, scale_of=state.name)
            tensors.append(StateTensor(scale, torch.uint8, scale_shape(param.shape)))
    return tensors


def state_dtype(name: str, param_dtype: torch.dtype, group: ParamGroup) -> torch.dtype:
    """The dtype of the state `name` of a parameter of `param_dtype` in `group`."""
    if param_dtype == torch.float32:
        return torch.float32
    requested = group["state_dtype"]
    for state in MODES[group["rounding"]].auxiliary:
        if state.name == name and state.dtype is not None:
            return state.dtype
    if isinstance(requested, Mapping):
        return requested.get(name, torch.bfloat16)
    return requested or torch.bfloat16


def new_state_dtype(state: State, group: ParamGroup, param: Tensor) -> torch.dtype:
    """The dtype of a new state of `param`: the one that `group` asks for, or BF16 if that is 8 bits and unsupported."""
    dtype = state.dtype or state_dtype(state.name, param.dtype, group)
    return torch.bfloat16 if dtype == torch.int8 and why_not_8_bits(state, param) else dtype


def why_not_8_bits(state: State, param: Tensor) -> str | None:
    """The reason why `state` of `param` cannot be stored in 8 bits, in words; None if it can."""
    if not state.averages:
        return f"{state.name} does not average over steps"
    rows = "rows" if flat_part(param) is None else "rows, or this rank's part of them,"
    return None if _has_whole_blocks(param) else f"{rows} are not multiples of {BLOCK} elements"


def stays_in_bf16(optimizer: Algorithm, group: ParamGroup, param: Tensor) -> list[str]:
    """For each state of `param` that `group` wants in 8 bits and that is stored in BF16, the reason."""
    states = optimizer.stored_states(group, param)
    wanted = (s for s in states if state_dtype(s.name, param.dtype, group) == torch.int8)
    reasons = (why_not_8_bits(state, param) for state in wanted)
    return [reason for reason in reasons if reason is not None]


def _has_whole_blocks(param: Tensor) -> bool:
    """Return whether the rows of `param`, its last dimension, are whole blocks. Others have no states in 8 bits."""
    shape, part = full_shape(param), flat_part(param)
    is_cut = part is not None and (part.start % BLOCK or param.numel() % BLOCK)
    return len(shape) > 1 and shape[-1] % BLOCK == 0 and not is_cut


def _check_blocks(param: Tensor) -> None:
    """Raise ValueError if a rank's part of a row of `param` is not made of whole blocks."""
    length = shard_length(param, -1)
    if is_sharded(param) and length % BLOCK != 0:
        raise ValueError(
            f"state_dtype=int8: a parameter of shape {tuple(param.shape)} is sharded as {param.placements}, "  # type: ignore[attr-defined]
            f"{length} elements of a row per rank, which cuts blocks of {BLOCK}; shard another dimension or over fewer "
            "ranks, or use state_dtype=bfloat16 for its param group"
        )


def rounded_to_nearest(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, values: Mapping[str, Any]
) -> dict[str, Any]:
    """States in the dtypes that new states of `param` have in `group`.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group.
        param: the parameter.
        values: floating-point tensors by name. Compensations, and what is not a tensor of the parameter's shape, are
            returned as they are.
    """
    known = {state.name: state for state in optimizer.stored_states(group, param)}
    states: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != param.shape or name in ("step", *LOW_BITS_STATES):
            states[name] = value
            continue
        dtype = new_state_dtype(known.get(name, State(name, role=0, averages=False)), group, param)
        states |= encoded(value, name) if dtype == torch.int8 else {name: value.to(dtype)}
    return states


def in_own_dtypes(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, saved: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Convert the states of `param` that were not saved in the dtype that new ones have in `group`.

    Into fewer bits they are rounded to nearest, without random bits, so that every sharding gets the same bits. A
    compensation or remainder is a part of the weight, so it stays as it is.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group, with the `state_dtype` to use.
        param: the parameter.
        saved: its entry in the state dict.

    Returns:
        The entry with converted states, and each conversion in words.

    Raises:
        ValueError: a state is to be stored in 8 bits, and `param` is sharded such that blocks are cut.
    """
    changes, old = [], set()
    for state in optimizer.states(group):
        before, after = dtype_in(saved, state.name), new_state_dtype(state, group, param)
        if before not in (None, after):
            changes.append(f"{state.name} from {dtype_name(before)} to {dtype_name(after)}")
            old |= {state.name, state.name + CODE_SUFFIX, state.name + SCALE_SUFFIX} & saved.keys()
    if not changes:
        return saved, []
    state_tensors(optimizer, group, param, existing={})  # raises the error
    kept = {name: value for name, value in saved.items() if name not in old}
    values = decoded_states({name: saved[name] for name in saved if name in old})
    return kept | rounded_to_nearest(optimizer, group, param, values), changes


PAGE = 4096
"""Bytes after which the last twelve bits of an address repeat."""
SMALLEST = 16 * PAGE
"""Bytes of the smallest state for which a page of extra memory is spent."""
_LINE = 64


def zeros_apart(
    param: Tensor, tensor: StateTensor, position: int, count: int, device: torch.device | None = None
) -> Tensor:
    """A new state: contiguous zeros, distributed as `param` is.

    On a CPU, states lie at other offsets from page boundaries than their weight and each other. A load waits for an
    earlier store in flight if the last twelve bits of their addresses are equal, even if they are pages apart (AMD,
    Software Optimization Guide, publication 25112, section 5.5, "False Dependencies"; Intel calls it 4-KByte aliasing).
    The C library places each of several large tensors 64 bytes further into a page than the one before, so a step would
    load from one state just where it stored to its neighbour a moment ago.

    Args:
        param: the parameter.
        tensor: the dtype and shape of the zeros.
        position: which of the parameter's states this is, from 0.
        count: how many states it has; they divide the page that begins at the weight.
        device: of the zeros; None means that of `param`.
    """
    part, dtype = local_shard(param), tensor.dtype
    device = device or part.device
    if tensor.state.scale_of is not None:
        scales = torch.zeros(scale_shape(part.shape), dtype=dtype, device=device)
        return dtensor_like(scales, param, tensor.shape)
    if tensor.state.mean_over is not None:
        means = torch.zeros(tensor.state.shape_for(part.shape), dtype=dtype, device=device)
        return dtensor_like(means, param, tensor.shape, tensor.state.mean_over)
    if device.type != "cpu" or part.numel() * dtype.itemsize < SMALLEST:
        return torch.zeros_like(param, dtype=dtype, device=device, memory_format=torch.contiguous_format)
    memory = torch.zeros(part.numel() + PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    target = part.data_ptr() + PAGE * (position + 1) // (count + 1)
    first = (target - memory.data_ptr()) % PAGE // _LINE * _LINE // dtype.itemsize
    zeros = memory[first : first + part.numel()].view(part.shape)
    # From a shard with an offset in its storage, torch makes a DTensor that it cannot copy, so shards have no offset.
    # A plain tensor keeps its offset, which is saved with it, so that loaded states are placed apart as well.
    return dtensor_like(from_dlpack(zeros), param) if is_sharded(param) else zeros


def copy_apart(state: Tensor) -> Tensor:
    """A contiguous copy of a state, at the same offset in memory of its own; see `zeros_apart`."""
    first = state.storage_offset()
    if is_sharded(state) or first >= PAGE:  # of an offset above, `state` is a part of other memory
        return state.clone(memory_format=torch.contiguous_format)
    return state.new_empty(first + state.numel())[first:].view(state.shape).copy_(state)
