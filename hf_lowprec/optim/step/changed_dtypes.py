"""A warning about parameters that were converted to another dtype after their first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.state.state_tensors import new_state_dtype
from hf_lowprec.optim.state.states_in_8_bits import dtype_in
from hf_lowprec.rounding import dtype_name


def warn_about_changed_dtypes(optimizer: Algorithm, earlier_dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Warn if parameters have changed their dtype, and have states in other dtypes than new states would have.

    Args:
        optimizer: about to take a step; the states of its parameters with a gradient exist.
        earlier_dtypes: parameter -> its dtype in the last step.
    """
    changed: list[tuple[Tensor, dict[str, torch.dtype]]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if earlier_dtypes.get(param, param.dtype) == param.dtype:
                continue
            existing = optimizer.state.get(param, {})  # those of parameters without gradient may be missing
            stored = ((s, dtype_in(existing, s.name)) for s in optimizer.stored_states(group, param.dtype))
            old = {s.name: dtype for s, dtype in stored if dtype and dtype != new_state_dtype(s, group, param)}
            if old:
                changed.append((param, old))
    if changed:
        param, old = changed[0]
        before, after = dtype_name(earlier_dtypes[param]), dtype_name(param.dtype)
        warnings.warn(
            f"{len(changed)} parameters were converted from {before} to {after} after their first step. Their states "
            f"({', '.join(old)}) stay in {dtype_name(next(iter(old.values())))}. Call cast_model(model) "
            "before the first step; or build a new optimizer now, which starts with new states",
            RuntimeWarning,
            stacklevel=2,
        )
