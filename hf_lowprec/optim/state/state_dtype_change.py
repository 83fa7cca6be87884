"""Converting saved states to the `state_dtype` that was given to the optimizer that loads them.

They get the dtypes that its new states have, so a parameter whose states cannot be in 8 bits gets BF16. Into fewer bits
they are rounded to nearest, without random bits, so that every sharding gets the same bits. A compensation or remainder
is a part of the weight, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.state.state_tensors import new_state_dtype, rounded_to_nearest, state_tensors
from hf_lowprec.optim.state.states_in_8_bits import CODE_SUFFIX, SCALE_SUFFIX, decoded_states, dtype_in
from hf_lowprec.rounding import dtype_name


class DtypeChange(NamedTuple):
    """The name of a state, and its dtype before and after a conversion."""

    name: str
    before: torch.dtype
    after: torch.dtype


def dtype_changes(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, saved: Mapping[str, Any]
) -> list[DtypeChange]:
    """The states of `param` that were not saved in the dtype that new ones have in `group`.

    Args:
        optimizer: the optimizer of `param`.
        group: its param group, with the `state_dtype` to use.
        param: the parameter.
        saved: its entry in the state dict, which may lack states.
    """
    present = ((state, dtype) for state in optimizer.states(group) if (dtype := dtype_in(saved, state.name)))
    changes = (DtypeChange(state.name, dtype, new_state_dtype(state, group, param)) for state, dtype in present)
    return [change for change in changes if change.before != change.after]


def converted_states(
    optimizer: Algorithm, group: ParamGroup, param: Tensor, saved: Mapping[str, Any], changes: Iterable[DtypeChange]
) -> dict[str, Any]:
    """The entry `saved` of a state dict with `changes` applied. Other arguments as for `dtype_changes`.

    Raises:
        ValueError: a state is to be stored in 8 bits, and `param` is sharded such that blocks are cut.
    """
    state_tensors(optimizer, group, param, existing={})
    keys = {change.name + suffix for change in changes for suffix in ("", CODE_SUFFIX, SCALE_SUFFIX)}
    old = keys & saved.keys()
    kept = {name: value for name, value in saved.items() if name not in old}
    values = decoded_states({name: saved[name] for name in saved if name in old})
    return kept | rounded_to_nearest(optimizer, group, param, values)


def dtype_change_note(optimizer_name: str, changes: Iterable[DtypeChange]) -> list[str]:
    """The warning that saved states were converted, if there are any `changes`."""
    listed = dict.fromkeys(f"{name} from {dtype_name(old)} to {dtype_name(new)}" for name, old, new in changes)
    if not listed:
        return []
    return [
        f"saved states were converted to the state_dtype that this {optimizer_name} was given, rounded to nearest: "
        f"{', '.join(listed)}"
    ]
