"""Converting saved states to the `state_dtype` that was given to the optimizer that loads them.

They get the dtypes that its new states have, so a parameter whose states cannot be in 8 bits gets BF16. Into fewer bits
they are rounded to nearest, without random bits, so that every sharding gets the same bits. A compensation or remainder
is a part of the weight, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.state.state_tensors import new_state_dtype, rounded_to_nearest, state_tensors
from hf_lowprec.optim.state.states_in_8_bits import CODE_SUFFIX, SCALE_SUFFIX, decoded_states, dtype_in
from hf_lowprec.rounding import dtype_name


def in_own_dtypes(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, saved: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Convert the states of `param` that were not saved in the dtype that new ones have in `group`.

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
