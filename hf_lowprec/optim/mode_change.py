"""Changing the rounding mode of a parameter that has been trained in another one.

A mode's auxiliary state is a part of the weight: under Kahan summation, the weight is `weight + compensation`, minus
the dither that the compensation may have started with. When a group is given a mode without that state, between two
steps or by loading a checkpoint of another mode, the weight is rounded once, in the new mode, from the value that both
have held together. It happens before the next step, since weights may be loaded after the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.initial_compensation import subtract_dither
from hf_lowprec.optim.sharding import global_indices, local_shard
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, round_nearest, round_stochastic
from hf_lowprec.rounding.low_bits import chunk_size
from hf_lowprec.rounding.random_bits import random_bits

STEP, ROLE = 0, 1
"""Step and role of the random bits. Steps count from 1, so no step draws them; the dither has role 0."""


def states_of_other_modes(param: Tensor, group: ParamGroup, optimizer_state: dict[str, Any]) -> set[str]:
    """Names of the states that `param` has from a rounding mode that its group had before."""
    if param.dtype not in LOW_PRECISION_DTYPES:
        return set()
    own = {state.name for state in MODES[group["rounding"]].auxiliary}
    return ({state.name for mode in MODES.values() for state in mode.auxiliary} - own) & optimizer_state.keys()


@torch.no_grad()
def fold_compensation(optimizer: Algorithm, param: Tensor, group: ParamGroup, number: int) -> None:
    """Round `weight + compensation - dither` to the weight's dtype in the mode of `group`; remove the compensation.

    Args:
        optimizer: the optimizer of `param`.
        param: BF16 or FP16 parameter, which may be a DTensor; this rank's elements are changed in place.
        group: its parameter group, which has the new mode.
        number: its number in the random stream.
    """
    compensation = optimizer.state[param]["compensation"]
    if param in optimizer.dithered:
        compensation = subtract_dither(compensation, param, group["seed"], number)
    part = local_shard(param)
    weight, low_bits = part.contiguous().view(-1), local_shard(compensation).contiguous().view(-1)
    first = 0
    for index in global_indices(param, chunk_size(part.device)):
        elements = slice(first, first + len(index))
        exact = weight[elements].float() + low_bits[elements].float()
        if group["rounding"] == "stochastic":
            bits = random_bits(seed=group["seed"], step=STEP, parameter=number, role=ROLE, index=index)
            rounded = round_stochastic(exact, bits)
        else:
            rounded = round_nearest(exact, weight.dtype)
        weight[elements] = rounded.to(weight.dtype)
        first = elements.stop
    if weight.data_ptr() != part.data_ptr():
        part.copy_(weight.view(part.shape))
    del optimizer.state[param]["compensation"]
    optimizer.dithered.discard(param)
