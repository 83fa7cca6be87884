"""The state tensors of a parameter: their names, dtypes and shapes.

States in 8 bits have a scale for each block of `BLOCK` elements of a row, in a tensor of their own. Blocks never cross
rows, so that no shard of whole rows cuts one, and every sharding gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim import validation
from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.sharding import shard_length
from hf_lowprec.rounding import State
from hf_lowprec.rounding.block_floats import BLOCK

SCALE_SUFFIX = "_scale"
"""What the name of a state's scales has after the name of the state."""


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


def state_tensors(optimizer: Algorithm, group: ParamGroup, param: Tensor) -> list[StateTensor]:
    """The state tensors that `param` has in `group`, in the order in which they are stored.

    States that exist have their dtype, others that which the group asks for.

    Raises:
        ValueError: a state is to be stored in 8 bits, and `param` is sharded such that blocks are cut.
    """
    existing = optimizer.state.get(param, {})
    tensors = []
    for state in optimizer.stored_states(group, param.dtype):
        dtype = validation.state_dtype(state.name, param.dtype, group)
        if dtype == torch.int8 and not (state.averages and has_whole_blocks(param)):
            dtype = torch.bfloat16
        dtype = existing[state.name].dtype if state.name in existing else dtype
        tensors.append(StateTensor(state, dtype, param.shape))
        if dtype == torch.int8:
            _check_blocks(param)
            scale = State(state.name + SCALE_SUFFIX, state.role, averages=False, dtype=torch.uint8, scale_of=state.name)
            tensors.append(StateTensor(scale, torch.uint8, scale_shape(param.shape)))
    return tensors


def has_whole_blocks(param: Tensor) -> bool:
    """Whether the rows of `param`, its last dimension, consist of whole blocks. Others have no states in 8 bits."""
    return param.dim() > 1 and param.shape[-1] % BLOCK == 0


def _check_blocks(param: Tensor) -> None:
    """Raise ValueError if a rank's part of a row of `param` is not made of whole blocks."""
    length = shard_length(param, -1)
    if length % BLOCK != 0:
        raise ValueError(
            f"state_dtype=int8: a parameter of shape {tuple(param.shape)} is sharded as {param.placements}, "  # type: ignore[attr-defined]
            f"{length} elements of a row per rank, which cuts blocks of {BLOCK}; shard another dimension or over fewer "
            "ranks, or use state_dtype=bfloat16 for its param group"
        )


def scale_shape(shape: torch.Size) -> torch.Size:
    """The shape of the scales of a state of `shape`."""
    return torch.Size((*shape[:-1], shape[-1] // BLOCK))
