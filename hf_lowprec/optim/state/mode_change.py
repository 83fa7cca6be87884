"""Changing the rounding mode of a parameter that has been trained in another one.

A mode's auxiliary state is a part of the weight: under Kahan summation, the weight is `weight + compensation`; of split
weights it is the master. When a group is given another mode, between two steps or by loading a checkpoint of another
mode, that value is stored as the new mode stores it: rounded once, or as a new pair. It happens before the next step,
since weights may be loaded after the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import global_places, local_shard
from hf_lowprec.optim.state.fp32_weights import change_weights, store_sums
from hf_lowprec.rounding import MODES, round_nearest, round_stochastic
from hf_lowprec.rounding.low_bits import fp32_value
from hf_lowprec.rounding.modes import AUXILIARY_STATES
from hf_lowprec.rounding.random_bits import random_bits

STEP, ROLE = 0, 1
"""Step and role of the random bits. Steps count from 1, so no step draws them."""


def states_of_other_modes(group: ParamGroup, optimizer_state: dict[str, Any]) -> set[str]:
    """Names of the states that a 16-bit parameter has from a rounding mode that its group had before."""
    own = {state.name for state in MODES[group["rounding"]].auxiliary}
    return (AUXILIARY_STATES.keys() - own) & optimizer_state.keys()


@without_grad
def convert_states(optimizer: Algorithm, param: Tensor, group: ParamGroup, number: int) -> None:
    """Store the value of a parameter that has been trained in another mode in the mode of `group`.

    Args:
        optimizer: the optimizer of `param`, whose state has an entry for the states of the new mode.
        param: BF16 or FP16 parameter, which may be a DTensor; this rank's elements are changed in place.
        group: its parameter group, which has the new mode.
        number: its number in the random stream.
    """
    state = optimizer.state[param]
    formers = states_of_other_modes(group, state)
    # There are two if a step failed between creating one and filling it.
    former = max(formers, key=lambda name: bool(local_shard(state[name]).any()))
    held = local_shard(state[former]).contiguous().view(-1)

    def rounded(weight: Tensor, part: slice) -> Tensor:
        exact = fp32_value(weight, held[part].to(weight.device))
        if not mode.random:
            return round_nearest(exact, weight.dtype).to(weight.dtype)
        index = global_places(param, torch.arange(part.start, part.stop, device=weight.device))
        bits = random_bits(seed=group["seed"], step=STEP, parameter=number, role=ROLE, index=index)
        return round_stochastic(exact, bits).to(weight.dtype)

    mode = MODES[group["rounding"]]
    if mode.auxiliary:
        (new,) = (each.name for each in mode.auxiliary)
        store_sums(param, state[new], held)
    else:
        change_weights(param, rounded)
    for name in formers:
        del state[name]
