"""State dicts: refuse what does not fit before anything is touched, and keep every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.validation import STATE_DTYPES, group_keys
from hf_lowprec.rounding import MODES

if TYPE_CHECKING:
    from hf_lowprec.optim.base import LowPrecisionOptimizer
    from hf_lowprec.optim.work import Group


def with_words(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with the groups' `state_dtype` as words; distributed checkpoints gather no `torch.dtype`."""

    def word(value: Any) -> Any:
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    return _map_state_dtype(state_dict, word)


def with_dtypes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `with_words`."""

    def dtype(value: Any) -> Any:
        return next((known for known in STATE_DTYPES if value == str(known).removeprefix("torch.")), value)

    return _map_state_dtype(state_dict, dtype)


def _map_state_dtype(state_dict: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    def changed(group: Group) -> Group:
        value = group.get("state_dtype")
        value = {k: change(v) for k, v in value.items()} if isinstance(value, Mapping) else change(value)
        return {**group, "state_dtype": value} if "state_dtype" in group else group

    return {**state_dict, "param_groups": [changed(group) for group in state_dict["param_groups"]]}


def check_state_dict(optimizer: LowPrecisionOptimizer, state_dict: dict[str, Any]) -> None:
    """Raise ValueError, naming what is wrong and what would be right, unless `state_dict` fits `optimizer`."""
    name = type(optimizer).__name__
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups and this {name} has {len(groups)}")
    for k, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"param group {k} of the state dict has {len(saved['params'])} parameters and this {name}'s has "
                f"{len(group['params'])}"
            )
        if missing := sorted(group_keys(optimizer) - saved.keys() - {"first_parameter"}):
            raise ValueError(
                f"param group {k} of the state dict has no {', '.join(map(repr, missing))}: it was not saved by "
                f"hf_lowprec.{name}. Resume it with the optimizer that saved it, or start this one with fresh state"
            )
        if saved["rounding"] != group["rounding"]:
            raise ValueError(
                f"param group {k} was saved with rounding={saved['rounding']!r} and this {name} has "
                f"rounding={group['rounding']!r}; build it with rounding={saved['rounding']!r} to resume, and change "
                "the group's 'rounding' then if it should go on in another mode"
            )
    for param, identifier, saved in _pairs(optimizer, state_dict):
        if identifier in state_dict["state"]:
            _check_state(optimizer, param, saved, state_dict["state"][identifier], f"parameter {identifier}")


def _check_state(
    optimizer: LowPrecisionOptimizer, param: Tensor, saved_group: Group, state: dict[str, Any], where: str
) -> None:
    specs = optimizer.stored_states(saved_group, param.dtype)
    expected = {"step", *(spec.name for spec in specs)}
    # States of options that were switched off meanwhile may stay; a compensation means that the weight was in 16 bits.
    foreign = {spec.name for mode in MODES.values() for spec in mode.auxiliary} & set(state)
    if expected - set(state) or (param.dtype == torch.float32 and foreign):
        raise ValueError(
            f"{where} of the state dict has the states {sorted(state)}; a {str(param.dtype).removeprefix('torch.')} "
            f"parameter of {type(optimizer).__name__} with rounding={saved_group['rounding']!r} has {sorted(expected)}"
        )
    if torch.as_tensor(state["step"]).numel() != 1:
        raise ValueError(f"step of {where} has {torch.as_tensor(state['step']).numel()} elements; it must have one")
    if not float(state["step"]) >= 0 or float(state["step"]) == float("inf"):
        raise ValueError(f"step of {where} is {float(state['step'])}; it must be a number of steps")
    for name in expected - {"step"}:
        if state[name].shape != param.shape:
            raise ValueError(
                f"{name} of {where} has shape {tuple(state[name].shape)} in the state dict; the parameter has "
                f"{tuple(param.shape)}"
            )
        if state[name].dtype not in STATE_DTYPES:
            raise ValueError(f"{name} of {where} has dtype {state[name].dtype}; states are bfloat16 or float32")


def restore_dtypes(optimizer: LowPrecisionOptimizer, state_dict: dict[str, Any]) -> None:
    """Put back the states whose dtype torch's loader changed to the parameter's; a step count becomes a tensor."""
    for param, identifier, _ in _pairs(optimizer, state_dict):
        if identifier in state_dict["state"]:
            step = state_dict["state"][identifier]["step"]
            optimizer.state[param]["step"] = torch.tensor(int(step), dtype=torch.int64, device="cpu")
        for name, value in state_dict["state"].get(identifier, {}).items():
            if name != "step" and optimizer.state[param][name].dtype != value.dtype:
                optimizer.state[param][name] = value.to(device=param.device, memory_format=torch.contiguous_format)


def _pairs(optimizer: LowPrecisionOptimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any, Group]]:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, identifier in zip(group["params"], saved["params"], strict=True):
            yield param, identifier, saved
