"""Changing the rounding mode of a parameter that has been trained in another one.

A mode's auxiliary state is a part of the weight: under Kahan summation, the weight is `weight + compensation`. When a
group is given a mode without that state, between two steps or by loading a checkpoint of another mode, the weight is
rounded once, in the new mode, from the value that both have held together. It happens before the next step, since
weights may be loaded after the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.sharding import contiguous_runs, local_shard
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, round_nearest, round_stochastic
from hf_lowprec.rounding.random_bits import random_bits

STEP, ROLE = 0, 1
"""Step and role of the random bits. Steps count from 1, so no step draws them."""
_CHUNK = 1 << 22
"""Elements that are computed at once; bounds the temporary tensors."""


def states_of_other_modes(param: Tensor, group: ParamGroup, optimizer_state: dict[str, Any]) -> set[str]:
    """Names of the states that `param` has from a rounding mode that its group had before."""
    if param.dtype not in LOW_PRECISION_DTYPES:
        return set()
    own = {state.name for state in MODES[group["rounding"]].auxiliary}
    return ({state.name for mode in MODES.values() for state in mode.auxiliary} - own) & optimizer_state.keys()


@torch.no_grad()
def fold_compensation(param: Tensor, group: ParamGroup, number: int, optimizer_state: dict[str, Any]) -> None:
    """Round `weight + compensation` to the weight's dtype in the mode of `group`, and remove the compensation.

    Args:
        param: BF16 or FP16 parameter, which may be a DTensor; this rank's elements are changed in place.
        group: its parameter group, which has the new mode.
        number: the parameter's number, which selects its random bits.
        optimizer_state: its entry in `optimizer.state`.
    """
    part = local_shard(param)
    weight = part.contiguous().view(-1)
    compensation = local_shard(optimizer_state["compensation"]).contiguous().view(-1)
    for first, length, start in contiguous_runs(param):
        for offset in range(0, length, _CHUNK):
            count = min(_CHUNK, length - offset)
            elements = slice(first + offset, first + offset + count)
            exact = weight[elements].float() + compensation[elements].float()
            if group["rounding"] == "stochastic":
                index = torch.arange(count, device=weight.device) + (start + offset)
                bits = random_bits(seed=group["seed"], step=STEP, parameter=number, role=ROLE, index=index)
                rounded = round_stochastic(exact, bits)
            else:
                rounded = round_nearest(exact, weight.dtype)
            weight[elements] = rounded.to(weight.dtype)
    if weight.data_ptr() != part.data_ptr():
        part.copy_(weight.view(part.shape))
    del optimizer_state["compensation"]
