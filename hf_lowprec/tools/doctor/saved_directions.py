"""The directions of a run's updates, from the moments in its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.monitor.tensor_names import parameter_kinds
from hf_lowprec.tools.doctor.update_sizes import ALL, SAMPLE
from hf_lowprec.tools.inspection.optimizer_states import ParameterState, read_parameter_states

_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def saved_directions(folder: Path, weights: StoredTensors) -> dict[str, Tensor]:
    """Sample the directions of a checkpoint with Adam's moments, by kind.

    Args:
        folder: the checkpoint.
        weights: its weights.

    Returns:
        About `SAMPLE` directions or more for each kind of which moments are found, and for "all"; parameters have
        shares in proportion to their size. Empty for a folder without moments.

    Raises:
        InputError: the optimizer state cannot be read.
    """
    kinds = parameter_kinds({name: info.shape for name, info in weights.infos.items()})
    states_of_adam = (s for s in read_parameter_states(folder) if s.group.betas and s.infos.keys() >= {*_MOMENTS})
    saved = [state for state in states_of_adam if state.step]
    groups: dict[str, list[ParameterState]] = {ALL: saved} if saved else {}
    for state in saved:
        if state.name in kinds:
            groups.setdefault(kinds[state.name], []).append(state)
    directions = {}
    for kind, states in groups.items():
        sizes = [state.infos[_MOMENTS[0]].shape.numel() for state in states]
        counts = [min(size, -(-SAMPLE * size // sum(sizes))) for size in sizes]
        directions[kind] = torch.cat([_directions(state, count) for state, count in zip(states, counts, strict=True)])
    return directions


def _directions(state: ParameterState, count: int) -> Tensor:
    """`|m̂|/(√v̂ + eps)` of `count` evenly spaced elements (FP64)."""
    betas, eps, step = state.group.betas, state.group.eps, state.step
    assert betas is not None and step is not None
    sampled = []
    for name, beta in zip(_MOMENTS, betas, strict=True):
        moment = state.read(name).reshape(-1)
        sampled.append(moment[torch.arange(count) * moment.numel() // count].double() / (1 - beta**step))
    return sampled[0].abs() / (sampled[1].sqrt() + eps)
