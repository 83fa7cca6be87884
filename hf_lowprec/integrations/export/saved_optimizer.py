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
        groups: the parameters of each param group.
        names: their names; None if the state dict only numbers them.
        is_ours: whether one of hf_lowprec's optimizers saved it.
    """

    groups: list[list[SavedParameter]]
    names: list[list[str | None]] | None
    is_ours: bool

    @property
    def refines(self) -> bool:
        """Whether it has compensations, or low bits."""
        return any(parameter.refines for group in self.groups for parameter in group)

    def by_name(self) -> dict[str, SavedParameter]:
        """The parameters of which more is known than their stored weight, by name."""
        pairs = (
            (name, parameter)
            for names, group in zip(self.names or [], self.groups, strict=False)
            for name, parameter in zip(names, group, strict=True)
        )
        return {name: parameter for name, parameter in pairs if name is not None and parameter.refines}


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
    sizes = [len(group["params"]) for group in groups]
    if names is not None and [*map(len, names)] != sizes:
        raise ValueError(
            f"{path.parent / PARAMETERS_NAME} names {[*map(len, names)]} parameters in its groups, but {path.name} has "
            f"{sizes}: they are from different checkpoints"
        )

    def parameter(key: Any, place: ParameterPlace) -> SavedParameter:
        compensation = states.get(key, {}).get(_COMPENSATION)
        if compensation is None:
            return SavedParameter(place, None, None if states.get(key) else kept.get(key), None)
        return SavedParameter(place, lambda: compensation, None, compensation.shape)

    by_key = {key: parameter(key, place) for key, place in parameter_places(groups)}
    if all(isinstance(key, str) for key in by_key):
        names = [[*group["params"]] for group in groups]
    return SavedOptimizer([[by_key[key] for key in group["params"]] for group in groups], names, _are_ours(groups))


def read_optimizer_folder(folder: Path) -> SavedOptimizer:
    """Read a folder that `torch.distributed.checkpoint` wrote, whose states have names."""
    stored = ShardedFolder(folder)
    groups = _groups({_GROUPS: _sharded_groups(stored)})
    paths = set(stored.paths())

    def parameter(name: str, place: ParameterPlace) -> SavedParameter:
        path = ("optimizer", _STATE, name, _COMPENSATION)
        info = stored.info(path) if path in paths else None
        if info is None:
            return SavedParameter(place, None, None, None)
        return SavedParameter(place, lambda: stored.read(path), None, info.shape)

    by_name = {name: parameter(name, place) for name, place in parameter_places(groups)}
    names = [[*group["params"]] for group in groups]
    return SavedOptimizer([[by_name[name] for name in group] for group in names], names, _are_ours(groups))


def _are_ours(groups: Iterable[ParamGroup]) -> bool:
    return any("rounding" in group for group in groups)


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
