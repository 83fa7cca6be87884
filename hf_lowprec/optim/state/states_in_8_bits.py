"""Whole states in 8 bits: the names and shapes of their codes and scales, and their values.

A step decodes and encodes elements as it loads and stores them, see `step/fused_step.py`. What is here is for
everything else that reads or converts states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import dtensor_like, local_shard
from hf_lowprec.rounding.block_floats import BLOCK, decode, encode
from hf_lowprec.rounding.low_bits import chunk_size

CODE_SUFFIX, SCALE_SUFFIX = "_code", "_scale"
"""The ends of the keys of a state's codes and scales, after the name of the state. Under that name itself, other
optimizers would take codes for values."""


def scale_shape(shape: torch.Size) -> torch.Size:
    """The shape of the scales of a state of `shape`."""
    return torch.Size((*shape[:-1], *(length // BLOCK for length in shape[-1:])))


def key_of(name: str, dtype: torch.dtype) -> str:
    """The key of the state `name` in `optimizer.state[param]` if it is stored in `dtype`; that of codes is its own."""
    return name + CODE_SUFFIX if dtype == torch.int8 else name


def states_in_codes(keys: Collection[str]) -> list[str]:
    """Names of the states in 8 bits among those with these keys."""
    names = [key.removesuffix(CODE_SUFFIX) for key in keys if key.endswith(CODE_SUFFIX)]
    return [name for name in names if name + SCALE_SUFFIX in keys]


def dtype_in(state: Mapping[str, Any], name: str) -> torch.dtype | None:
    """The dtype in which the entry `state` of a parameter stores the state `name`; None if it does not."""
    stored = state.get(name + CODE_SUFFIX, state.get(name))
    return None if stored is None else stored.dtype


def decoded_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a parameter, with FP32 values in place of codes and scales.

    Args:
        state: its entry in `optimizer.state` or in a state dict, or a part of it. Tensors may be DTensors.
    """
    names = states_in_codes(state.keys())
    parts = {name + suffix for name in names for suffix in (CODE_SUFFIX, SCALE_SUFFIX)}
    others = {key: value for key, value in state.items() if key not in parts}
    return others | {name: decoded(state[name + CODE_SUFFIX], state[name + SCALE_SUFFIX], name) for name in names}


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
