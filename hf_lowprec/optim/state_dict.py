"""State dicts: validated before anything is changed; dtypes are preserved."""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.validation import STATE_DTYPES, check_group, group_keys, keywords
from hf_lowprec.rounding import MODES, dtype_name

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm import Algorithm, ParamGroup

FORMAT = 2
"""Version of the state dicts written here. Format 1, of the first commits, has no header."""

HEADER = "header"
"""Key of a param group that is being loaded: who wrote it, in which format; the keys that format 1 did not have."""

ADDED_KEYS: tuple[str, ...] = ("first_parameter",)
"""Optional keys of param groups that format 1 did not have. They travel in the header; without one a group is as it was
in format 1."""

_CARRIER = "state_rounding"
"""The key whose saved value carries the header, as one JSON object with the value itself.

Distributed checkpoints keep nothing but states and the keys of param groups, and torch loads them key by key: one that
the checkpoint lacks is an error. A header under a key of its own would lock all earlier checkpoints out. It is a string
because torch takes everything else apart.
"""

_REQUIRED = {"lr", "rounding"}
"""What a group must say; its default would be a guess."""

_IN_EVERY_GROUP = {"maximize", "seed", "state_dtype", "state_rounding"}
"""Arguments of every algorithm. If a group without a header lacks one, that does not mean another algorithm saved it.
"""

_WRITTEN_BY_TORCH = {
    *("params", "param_names", "differentiable"),
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
}
"""Keys that torch and its schedulers leave in param groups."""


def saved_form(optimizer: Algorithm, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` as it is saved: dtypes by name, since distributed checkpoints gather no `torch.dtype`; headers."""

    def saved(group: ParamGroup) -> ParamGroup:
        header = {_CARRIER: group[_CARRIER], "optimizer": algorithm(optimizer), "format": FORMAT}
        header |= {key: group[key] for key in ADDED_KEYS if key in group}
        kept = {key: value for key, value in group.items() if key not in ADDED_KEYS}
        return {**_with_state_dtype(kept, _dtype_name), _CARRIER: json.dumps(header, default=operator.index)}

    return {**state_dict, "param_groups": [saved(group) for group in state_dict["param_groups"]]}


def live_form(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `saved_form`; groups that have a header keep it under `HEADER`.

    Raises:
        ValueError: a header is damaged.
    """

    def live(group: ParamGroup) -> ParamGroup:
        group = _with_state_dtype(group, _dtype)
        carried = group.get(_CARRIER)
        if not isinstance(carried, str) or not carried.startswith("{"):
            return group
        try:
            header = json.loads(carried)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"state_rounding of a param group is damaged: {error or type(error).__name__}") from None
        return {**group, _CARRIER: header.pop(_CARRIER, None), HEADER: header}

    return {**state_dict, "param_groups": [live(group) for group in state_dict["param_groups"]]}


def _dtype_name(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def _dtype(value: Any) -> Any:
    return next((dtype for dtype in STATE_DTYPES if value == _dtype_name(dtype)), value)


def _with_state_dtype(group: ParamGroup, change: Callable[[Any], Any]) -> ParamGroup:
    value = group.get("state_dtype")
    value = {k: change(v) for k, v in value.items()} if isinstance(value, Mapping) else change(value)
    return {**group, "state_dtype": value} if "state_dtype" in group else group


def algorithm(optimizer: Algorithm) -> str:
    """The name of the algorithm's class; a subclass of one of ours has its state and goes by its name."""
    ours = (cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("hf_lowprec.optim.algorithms."))
    return next(ours, type(optimizer)).__name__


def checked(optimizer: Algorithm, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`, of `saved_form`, as torch may load it into `optimizer`; what it does not say has its default.

    Raises:
        ValueError: `state_dict` does not fit `optimizer`; the message says what is wrong and what would be right.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"a state dict with the keys {sorted(map(str, state_dict))} is not that of an optimizer, which has 'state' "
            "and 'param_groups'"
        )
    name = algorithm(optimizer)
    groups, saved_groups = optimizer.param_groups, live_form(state_dict)["param_groups"]
    for k, saved in enumerate(saved_groups):
        _check_header(name, saved, f"param group {k}")
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups and this {name} has {len(groups)}")
    if missing := [k for k, saved in enumerate(saved_groups) if "params" not in saved]:
        raise ValueError(f"param group {missing[0]} of the state dict has no 'params', the numbers of its parameters")
    _check_numbers(state_dict["state"], {number for saved in saved_groups for number in saved["params"]})
    for k, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"param group {k} of the state dict has {len(saved['params'])} parameters and this {name}'s has "
                f"{len(group['params'])}"
            )
        saved_groups[k] = saved = _completed(optimizer, group, saved, f"param group {k}")
        check_group(optimizer, saved, f"param group {k} of the state dict")
        if saved["rounding"] != group["rounding"]:
            raise ValueError(
                f"param group {k} was saved with rounding={saved['rounding']!r} and this {name} has "
                f"rounding={group['rounding']!r}; build it with rounding={saved['rounding']!r} to resume, and change "
                "the group's 'rounding' then if it should go on in another mode"
            )
        for flag in optimizer.flags:
            if bool(saved[flag]) != bool(group[flag]):
                raise ValueError(
                    f"param group {k} was saved with {flag}={saved[flag]!r} and this {name} has {flag}={group[flag]!r} "
                    "there; give the optimizer the same groups in the same order"
                )
    found = {**state_dict, "param_groups": saved_groups}
    for param, identifier, saved in _pairs(optimizer, found):
        if identifier in state_dict["state"]:
            _check_state(optimizer, param, saved, state_dict["state"][identifier], f"parameter {identifier}")
    return found


def _check_header(name: str, saved: ParamGroup, where: str) -> None:
    """Raise ValueError unless a group was saved by the algorithm `name`, in a format that is known here."""
    header = saved.get(HEADER, {"format": 1})
    if not isinstance(header.get("format"), int) or header["format"] > FORMAT:
        raise ValueError(
            f"{where} of the state dict has format {header.get('format')!r} and this hf_lowprec knows up to {FORMAT}; "
            "upgrade hf_lowprec to load it"
        )
    writer = header.get("optimizer", name)
    if writer != name:
        raise ValueError(
            f"the state of {writer} cannot be loaded into {name}: resume with {writer}, or start {name} afresh from "
            "the checkpoint's weights alone (from_pretrained with its folder, and no resume_from_checkpoint)"
        )


def _completed(optimizer: Algorithm, group: ParamGroup, saved: ParamGroup, where: str) -> ParamGroup:
    """`saved` without its header, and with what it does not say.

    Raises:
        ValueError: it lacks what has no default, or has a key that is unknown here.
    """
    name, arguments = algorithm(optimizer), group_keys(optimizer)
    has_header = HEADER in saved
    header = saved.get(HEADER, {})
    saved = {**saved, **{key: header[key] for key in ADDED_KEYS if key in header}}
    saved.pop(HEADER, None)
    defaults = {key: value for key, value in keywords(type(optimizer)).items() if key in arguments - _REQUIRED}
    given = defaults.keys() if has_header else defaults.keys() & _IN_EVERY_GROUP
    missing = sorted(arguments - saved.keys() - {*ADDED_KEYS})
    if lacking := [key for key in missing if key not in given]:
        raise ValueError(
            f"{where} of the state dict has no {', '.join(map(repr, lacking))}: it was not saved by "
            f"hf_lowprec.{name}. Resume it with the optimizer that saved it, or start this one with fresh state"
        )
    if unknown := sorted(saved.keys() - arguments - group.keys() - _WRITTEN_BY_TORCH - {*ADDED_KEYS}):
        raise ValueError(
            f"{where} of the state dict has {', '.join(map(repr, unknown))}, unknown to {name} and to this "
            "optimizer's group: another optimizer or a newer hf_lowprec saved it. Resume with that one; if you put it "
            "there yourself, put it in the group as well"
        )
    return {**{key: defaults[key] for key in missing}, **saved}


def changed_options(optimizer: Algorithm, saved_groups: list[ParamGroup]) -> list[str]:
    """Arguments in which the groups that are loaded differ from those of `optimizer`, as `name=saved (was value)`.

    A learning rate is left out, and so is what a scheduler cycles with it: they differ in every training that goes on.
    So are `ADDED_KEYS`, which are nobody's choice.
    """
    found: dict[str, None] = {}
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        exempt = {"lr", *ADDED_KEYS} | ({"betas", "momentum"} if "max_momentum" in saved | group else set())
        for key in sorted(group_keys(optimizer) - exempt):
            if _plain(saved[key]) != _plain(group[key]):
                found[f"{key}={_plain(saved[key])!r} (was {_plain(group[key])!r})"] = None
    return list(found)


def _plain(value: Any) -> Any:
    """`value` as a number, a tuple or a name, to compare: checkpoints make lists of tuples."""
    return tuple(value) if isinstance(value, list) else value.item() if isinstance(value, Tensor) else value


def warn_of_changes(optimizer: Algorithm, changed: list[str]) -> None:
    """Warn, if there are any, that options of a loaded state dict took the place of those that were given."""
    if changed:
        warnings.warn(
            f"the state dict that was loaded replaces options of this {algorithm(optimizer)}: {', '.join(changed)}; "
            "to train with other ones, set them in optimizer.param_groups after loading",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_numbers(states: Mapping[Any, Any], numbers: set[Any]) -> None:
    """Raise ValueError for states that torch would pass over, so that their parameters began anew."""
    for key in states:
        if isinstance(key, str) and key.isdecimal() and key not in numbers:
            raise ValueError(f"the state dict has a state of parameter {key!r}, a string as JSON has it; make keys int")
        if isinstance(key, int) and key not in numbers:
            raise ValueError(f"the state dict has a state of parameter {key}, which is in none of its param groups")


def _check_state(
    optimizer: Algorithm, param: Tensor, saved_group: ParamGroup, state: dict[str, Any], where: str
) -> None:
    specs = optimizer.stored_states(saved_group, param.dtype)
    expected = {"step", *(spec.name for spec in specs)}
    kind = f"a {dtype_name(param.dtype)} parameter of {type(optimizer).__name__}"
    right = f"{kind} with rounding={saved_group['rounding']!r} has {sorted(expected)}"
    if missing := sorted(expected - state.keys()):
        raise ValueError(
            f"{where} of the state dict has no {', '.join(map(repr, missing))}; {right}. Load a complete state dict, "
            "or start this optimizer with fresh state"
        )
    # A compensation means that the weight was in 16 bits.
    if param.dtype == torch.float32 and (foreign := sorted(_of_any_mode() & state.keys())):
        raise ValueError(f"{where} of the state dict has {', '.join(map(repr, foreign))}; {right}")
    possible = expected | _of_any_option(optimizer, saved_group) | _of_any_mode()
    if unknown := sorted(map(repr, state.keys() - possible - optimizer.state.get(param, {}).keys())):
        raise ValueError(
            f"{where} of the state dict has {', '.join(unknown)}, unknown to {algorithm(optimizer)} and to this "
            "optimizer's state: another optimizer or a newer hf_lowprec saved it. Resume with that one; if you put it "
            "there yourself, put it in optimizer.state[param] as well, or take it out of the state dict"
        )
    if isinstance(state["step"], Tensor) and state["step"].numel() != 1:
        raise ValueError(f"step of {where} has {state['step'].numel()} elements; it must have one")
    if not _is_count(state["step"]):
        step = state["step"].item() if isinstance(state["step"], Tensor) else state["step"]
        raise ValueError(f"step of {where} is {step!r}; it must be a whole number >= 0 and < 2**63")
    for name in expected - {"step"}:
        if not isinstance(state[name], Tensor):
            raise ValueError(f"{name} of {where} is no tensor but {state[name]!r} in the state dict")
        if state[name].shape != param.shape:
            raise ValueError(
                f"{name} of {where} has shape {tuple(state[name].shape)} in the state dict; the parameter has "
                f"{tuple(param.shape)}"
            )
        if state[name].dtype not in STATE_DTYPES:
            raise ValueError(f"{name} of {where} has dtype {state[name].dtype}; states are bfloat16 or float32")


def _of_any_option(optimizer: Algorithm, group: ParamGroup) -> set[str]:
    """Names of the states that a parameter of `group` has with every option on; those of one switched off may stay."""
    options = (key for key in group_keys(optimizer) - {*optimizer.flags} if isinstance(group.get(key), int | float))
    switched_on = {key: group[key] or True for key in options}
    return {spec.name for spec in optimizer.states({**group, **switched_on})}


def _of_any_mode() -> set[str]:
    """Names of the states of all rounding modes; a group may have been given another mode between two steps."""
    return {spec.name for mode in MODES.values() for spec in mode.auxiliary}


def _is_count(step: Any) -> bool:
    """Whether `step`, a number or a tensor, is a whole number that int64 can hold."""
    try:
        value = step.item() if isinstance(step, Tensor) else step
        return int(value) == value and 0 <= int(value) < 2**63
    except (TypeError, ValueError, OverflowError):  # of no number, NaN, infinity
        return False


def restore_dtypes(optimizer: Algorithm, state_dict: dict[str, Any]) -> None:
    """Put back the states whose dtype torch's loader changed to the parameter's; a step count becomes a tensor."""
    for param, identifier, _ in _pairs(optimizer, state_dict):
        if identifier in state_dict["state"]:
            step = state_dict["state"][identifier]["step"]
            optimizer.state[param]["step"] = torch.tensor(int(step), dtype=torch.int64, device="cpu")
        for name, value in state_dict["state"].get(identifier, {}).items():
            if name != "step" and optimizer.state[param][name].dtype != value.dtype:
                optimizer.state[param][name] = value.to(device=param.device, memory_format=torch.contiguous_format)


def _pairs(optimizer: Algorithm, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any, ParamGroup]]:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, identifier in zip(group["params"], saved["params"], strict=True):
            yield param, identifier, saved
