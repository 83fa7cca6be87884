"""Whole states in 8 bits: the names and shapes of their codes and scales, and their values.

A step decodes and encodes elements as it loads and stores them, see `step/fused_step.py`. What is here is for
everything else that reads or converts states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import dtensor_like, local_shard
from hf_lowprec.rounding import dtype_name
from hf_lowprec.rounding.block_floats import BLOCK, decode, encode
from hf_lowprec.rounding.low_bits import chunk_size
from hf_lowprec.rounding.modes import AUXILIARY_STATES

CODE_SUFFIX, SCALE_SUFFIX = "_code", "_scale"
"""The ends of the keys of a state's codes and scales, after the name of the state. Under that name itself, other
optimizers would take codes for values; early versions saved them so."""


def scale_shape(shape: torch.Size) -> torch.Size:
    """The shape of the scales of a state of `shape`."""
    return torch.Size((*shape[:-1], *(length // BLOCK for length in shape[-1:])))


def holds_codes(name: str, dtype: torch.dtype) -> bool:
    """Return whether a state of this name and dtype is stored as codes with scales, see `State.dtype`."""
    return dtype == torch.int8 and name not in AUXILIARY_STATES


def key_of(name: str, dtype: torch.dtype) -> str:
    """The key of the state `name` in `optimizer.state[param]` if it is stored in `dtype`; that of codes is its own."""
    return name.removesuffix(CODE_SUFFIX) + CODE_SUFFIX if holds_codes(name, dtype) else name


def codes_in(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Names of the states in 8 bits among those with these keys and dtypes, and the key of the codes of each."""
    names = {key.removesuffix(CODE_SUFFIX): key for key, dtype in dtypes.items() if holds_codes(key, dtype)}
    return {name: key for name, key in names.items() if name + SCALE_SUFFIX in dtypes}


def dtype_in(state: Mapping[str, Any], name: str) -> torch.dtype | None:
    """The dtype in which the entry `state` of a parameter stores the state `name`; None if it does not."""
    stored = state.get(name + CODE_SUFFIX, state.get(name))
    return None if stored is None else stored.dtype


def check_codes(were: set[str], state: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if codes that an early version saved were converted to floating point since then.

    Args:
        were: names of the states that it saved in 8 bits.
        state: the parameter's entry in the state dict.
        where: its name in messages.
    """
    if converted := sorted(were & state.keys()):
        raise ValueError(
            f"{converted[0]} of {where} was saved in 8 bits and is {dtype_name(state[converted[0]].dtype)} in the "
            "state dict: a distributed checkpoint was loaded into an optimizer with another state_dtype, which "
            "converts states to its dtypes. Load it with the state_dtype of the checkpoint in optimizer.param_groups; "
            "one that is put there before set_optimizer_state_dict converts the states"
        )


def decoded_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a parameter, with FP32 values in place of codes and scales.

    Args:
        state: its entry in `optimizer.state` or in a state dict, or a part of it. Tensors may be DTensors.
    """
    codes = codes_in({key: value.dtype for key, value in state.items() if isinstance(value, Tensor)})
    parts = {*codes.values(), *(name + SCALE_SUFFIX for name in codes)}
    others = {key: value for key, value in state.items() if key not in parts}
    return others | {name: decoded(state[key], state[name + SCALE_SUFFIX], name) for name, key in codes.items()}


def decoded(code: Tensor, scale: Tensor, name: str) -> Tensor:
    """The FP32 values of a whole state in 8 bits.

    Args:
        code: its codes, int8.
        scale: its scales, uint8 of the shape `scale_shape(code.shape)`.
        name: its name.
    """
    codes, scales = local_shard(code).int(), local_shard(scale).int().repeat_interleave(BLOCK, dim=-1)
    return dtensor_like(decode(codes, scales, is_nonnegative(name)), code)


def encoded(value: Tensor, name: str) -> dict[str, Tensor]:
    """A whole state in 8 bits, rounded to nearest: its codes and its scales, by the keys of both.

    Args:
        value: floating-point tensor whose rows, or this rank's part of them, are made of blocks.
        name: its name.
    """
    shard = local_shard(value)
    code, scale = (
        torch.empty(shape, dtype=dtype, device=shard.device)
        for shape, dtype in ((shard.shape, torch.int8), (scale_shape(shard.shape), torch.uint8))
    )
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
    """Return whether no element of the state `name` is ever negative; for states whose algorithm is not known."""
    return name.endswith("_sq")
