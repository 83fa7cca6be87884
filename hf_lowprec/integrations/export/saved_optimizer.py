"""Reads compensations from a saved optimizer, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME
from hf_lowprec.integrations.export.stored_tensors import ShardedFolder, load_mapped
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.fp32_weights import ParameterPlace, missing_part, parameter_places
from hf_lowprec.optim.state_dict import ADDED_KEYS, HEADER, LOW_BITS, from_saved_form
from hf_lowprec.rounding.low_bits import low_bits, restore_saved_low_bits

_COMPENSATION = "compensation"
_STATE, _GROUPS = "state", "param_groups"


class SavedParameter(NamedTuple):
    """What a saved optimizer knows of a parameter.

    Attributes:
        place: its place in the optimizer.
        compensation: reads its compensation; None if it has none.
        low_bits: the low bits that its cast has kept, as they were saved; None if there are none.
        shape: the shape of its compensation; None without one.
    """

    place: ParameterPlace
    compensation: Callable[[], Tensor] | None
    low_bits: dict[str, Any] | None
    shape: torch.Size | None

    @property
    def refines(self) -> bool:
        """Whether more is known of the weight than the checkpoint's weight files contain."""
        return self.compensation is not None or self.low_bits is not None

    def estimate(self, weight: Tensor) -> Tensor:
        """The FP32 estimate of the parameter, whose stored value is `weight`."""
        if self.low_bits is not None:
            restore_saved_low_bits(weight, self.low_bits)
            missing = low_bits(weight)
        else:
            missing = missing_part(weight, self.compensation() if self.compensation else None, self.place)
        return weight.float() if missing is None else weight.float() + missing.float()


class SavedOptimizer(NamedTuple):
    """A saved optimizer.

    Attributes:
        parameters: by name.
        unnamed: the number of parameters that have a compensation but no name, because the checkpoint has no names.
        is_ours: whether one of hf_lowprec's optimizers saved it.
    """

    parameters: dict[str, SavedParameter]
    unnamed: int
    is_ours: bool


def read_optimizer_file(path: Path, names: list[list[str | None]] | None) -> SavedOptimizer:
    """Read a state dict that `torch.save` wrote.

    Args:
        path: the file.
        names: the names of the parameters of each group; None if they are unknown. They are not needed if the state
            dict has names instead of numbers, as those of FSDP2 have.

    Raises:
        ValueError: it is not the state dict of an optimizer, or `names` belong to another one.
    """
    saved = load_mapped(path)
    if not isinstance(saved, dict) or not {_STATE, _GROUPS} <= saved.keys():
        raise ValueError(f"{path} is not the state dict of an optimizer, which has 'state' and 'param_groups'")
    groups, states, kept = _groups(saved), saved[_STATE], saved.get(LOW_BITS, {})
    if names is not None and [len(group) for group in names] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"{path.parent / PARAMETERS_NAME} names {[*map(len, names)]} parameters in its groups, but {path.name} has "
            f"{[len(group['params']) for group in groups]}: they are from different checkpoints"
        )
    flat_names = None if names is None else [name for group in names for name in group]
    parameters: dict[str, SavedParameter] = {}
    unnamed = 0
    for k, (key, place) in enumerate(parameter_places(groups)):
        compensation = states.get(key, {}).get(_COMPENSATION)
        parameter = SavedParameter(
            place,
            None if compensation is None else lambda tensor=compensation: tensor,  # type: ignore[misc]
            kept.get(key) if not states.get(key) else None,
            None if compensation is None else compensation.shape,
        )
        name = key if isinstance(key, str) else flat_names[k] if flat_names else None
        if name is not None:
            parameters[name] = parameter
        elif flat_names is None:
            unnamed += parameter.refines
    return SavedOptimizer(parameters, unnamed, any("rounding" in group for group in groups))


def read_optimizer_folder(folder: Path) -> SavedOptimizer:
    """Read a folder that `torch.distributed.checkpoint` wrote, whose states have names."""
    stored = ShardedFolder(folder)
    groups = _groups({_GROUPS: _sharded_groups(stored)})
    parameters = {}
    for name, place in parameter_places(groups):
        path = ("optimizer", _STATE, name, _COMPENSATION)
        info = stored.info(path) if path in stored.paths() else None
        parameters[name] = SavedParameter(
            place,
            None if info is None else lambda path=path: stored.read(path),  # type: ignore[misc]
            None,
            None if info is None else info.shape,
        )
    return SavedOptimizer(parameters, 0, any("rounding" in group for group in groups))


def _sharded_groups(stored: ShardedFolder) -> Iterable[Mapping[str, Any]]:
    """The param groups of a folder, whose entries are stored one by one."""
    groups: dict[int, dict[str, Any]] = {}
    for path in stored.paths():
        if path[:2] == ("optimizer", _GROUPS) and len(path) == 4:
            groups.setdefault(path[2], {})[path[3]] = stored.read(path)
    return [groups[k] for k in sorted(groups)]


def _groups(saved: Mapping[str, Any]) -> list[ParamGroup]:
    """The param groups of a saved state dict, with the keys that ours keep in their header."""
    groups = from_saved_form({**saved})[_GROUPS]
    return [{**group, **{k: v for k, v in group.get(HEADER, {}).items() if k in ADDED_KEYS}} for group in groups]
