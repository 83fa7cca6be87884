"""A warning about parameters that were converted to another dtype after their first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.state_tensors import new_state_dtype
from hf_lowprec.rounding import dtype_name


def warn_about_changed_dtypes(optimizer: Algorithm, earlier_dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Warn if parameters have changed their dtype, and have states in other dtypes than new states would have.

    Args:
        optimizer: about to take a step; the states of its parameters with a gradient exist.
        earlier_dtypes: parameter -> its dtype in the last step.
    """
    changed: list[tuple[Tensor, list[str]]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if earlier_dtypes.get(param, param.dtype) == param.dtype:
                continue
            existing = optimizer.state.get(param, {})  # those of parameters without gradient may be missing
            states = (each for each in optimizer.stored_states(group, param.dtype) if each.name in existing)
            old = [each.name for each in states if existing[each.name].dtype != new_state_dtype(each, group, param)]
            if old:
                changed.append((param, old))
    if changed:
        param, old = changed[0]
        before, after = dtype_name(earlier_dtypes[param]), dtype_name(param.dtype)
        warnings.warn(
            f"{len(changed)} parameters were converted from {before} to {after} after their first step. Their states "
            f"({', '.join(old)}) stay in {dtype_name(optimizer.state[param][old[0]].dtype)}. Call cast_model(model) "
            "before the first step; or build a new optimizer now, which starts with new states",
            RuntimeWarning,
            stacklevel=2,
        )
