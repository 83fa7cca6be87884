"""Reads compensations and remainders from a saved optimizer, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import ShardedFolder, TensorInfo, load_mapped
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.state.low_bits import RandomStream, fp32_values, low_bits_state, random_streams
from hf_lowprec.optim.state.state_dict_format import (
    ADDED_KEYS,
    DITHERED,
    HEADER,
    LOW_BITS,
    from_saved_form,
    in_own_dtype,
)
from hf_lowprec.rounding.low_bits import dither_stream_of, low_bits, restore_saved_low_bits
from hf_lowprec.rounding.modes import LOW_BITS_STATES

_STATE, _GROUPS = "state", "param_groups"


class SavedParameter(NamedTuple):
    """A parameter as a saved optimizer holds it.

    Attributes:
        compensation: reads its compensation or remainder; None if it has neither.
        shape: the shape of that; None without one.
        dither: the random stream of the dither that it started with; None if there was none.
        low_bits: the low bits that its cast has kept, as they were saved; None if there are none.
    """

    compensation: Callable[[], Tensor] | None = None
    shape: torch.Size | None = None
    dither: RandomStream | None = None
    low_bits: dict[str, Any] | None = None

    @property
    def refines(self) -> bool:
        """True if more is known of the weight than the checkpoint's weight files contain."""
        return self.compensation is not None or self.low_bits is not None

    def estimate(self, weight: Tensor) -> Tensor:
        """The FP32 estimate of the parameter, whose stored value is `weight`."""
        if self.low_bits is not None:
            restore_saved_low_bits(weight, self.low_bits)
        kept = self.compensation() if self.compensation else low_bits(weight)
        dither = self.dither if self.compensation else dither_stream_of(weight)
        return weight.float() if kept is None else fp32_values(weight, kept, dither)


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
        """True if it has compensations, remainders, or low bits."""
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
    groups, states, kept = saved_param_groups(saved), from_saved_form(saved)[_STATE], saved.get(LOW_BITS, {})
    sizes = [len(group["params"]) for group in groups]
    if names is not None and [*map(len, names)] != sizes:
        raise ValueError(
            f"{path.parent / PARAMETERS_NAME} names {[*map(len, names)]} parameters in its groups, but {path.name} has "
            f"{sizes}: they are from different checkpoints"
        )

    dithers = _dithers(groups)

    def parameter(key: Any) -> SavedParameter:
        state = low_bits_state(states.get(key, {}))
        if state is None:
            return SavedParameter(low_bits=None if states.get(key) else kept.get(key))
        return SavedParameter(lambda: state, state.shape, dithers.get(key))

    parameters = [[parameter(key) for key in group["params"]] for group in groups]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        names = [[*group["params"]] for group in groups]
    return SavedOptimizer(parameters, names, _are_ours(groups))


def read_optimizer_folder(folder: Path) -> SavedOptimizer:
    """Read a folder that `torch.distributed.checkpoint` wrote, whose states have names."""
    stored = ShardedFolder(folder)
    groups = saved_param_groups({_GROUPS: sharded_param_groups(stored)})
    paths = set(stored.paths())

    dithers = _dithers(groups)

    def parameter(name: str) -> SavedParameter:
        candidates = (("optimizer", _STATE, name, state) for state in LOW_BITS_STATES)
        path = next((path for path in candidates if path in paths), None)
        info = stored.info(path) if path else None
        if path is None or info is None:
            return SavedParameter()
        shape = info_in_own_dtype(path[-1], info).shape
        return SavedParameter(lambda: in_own_dtype(path[-1], stored.read(path)), shape, dithers.get(name))

    names: list[list[str | None]] = [[*group["params"]] for group in groups]
    parameters = [[parameter(name) for name in group["params"]] for group in groups]
    return SavedOptimizer(parameters, names, _are_ours(groups))


def info_in_own_dtype(name: str, info: TensorInfo) -> TensorInfo:
    """Shape and dtype of the saved state `name`, as `in_own_dtype` returns it."""
    own = in_own_dtype(name, torch.empty(info.shape, dtype=info.dtype, device="meta"))
    return TensorInfo(own.shape, own.dtype)


def _are_ours(groups: Iterable[ParamGroup]) -> bool:
    return any("rounding" in group for group in groups)


def sharded_param_groups(stored: ShardedFolder) -> Iterable[Mapping[str, Any]]:
    """The param groups of a folder, whose entries are stored one by one, those of a mapping as well."""
    groups: dict[int, dict[str, Any]] = {}
    for path in stored.paths():
        if path[:2] == ("optimizer", _GROUPS) and len(path) in (4, 5):
            group = groups.setdefault(path[2], {})
            entries = group if len(path) == 4 else group.setdefault(path[3], {})
            entries[path[-1]] = stored.read(path)
    return [groups[k] for k in sorted(groups)]


def saved_param_groups(saved: Mapping[str, Any]) -> list[ParamGroup]:
    """The param groups of a saved state dict, with the keys that ours keep in their header."""
    groups = from_saved_form({**saved})[_GROUPS]
    return [{**group, **{k: v for k, v in group.get(HEADER, {}).items() if k in ADDED_KEYS}} for group in groups]


def _dithers(groups: list[ParamGroup]) -> dict[Any, RandomStream]:
    """The random streams of dithered parameters, by their keys in the state dict."""
    flags = (group.get(HEADER, {}).get(DITHERED, "").ljust(len(group["params"]), "0") for group in groups)
    streams = random_streams(groups)
    return {key: stream for (key, stream), flag in zip(streams, "".join(flags), strict=True) if flag == "1"}
