"""Loading of optimizer state dicts.

A state dict is checked completely before anything is changed, and missing keys are added. torch's loader takes the
param groups, and what users keep besides the states of parameters.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.state.fp32_weights import low_bits_state
from hf_lowprec.optim.state.saved_formats import (
    ADDED_KEYS,
    HEADER,
    LOW_BITS,
    SKIPPED_STEPS,
    START_AGAIN,
    ForeignFormat,
    algorithm_name,
    foreign_format,
    from_saved_form,
    numbered_parameters,
)
from hf_lowprec.optim.state.states import (
    convert_factored,
    copy_apart,
    in_own_dtypes,
    rounded_to_nearest,
    state_tensors,
    why_not_8_bits,
)
from hf_lowprec.optim.validation import STATE_DTYPES, check_group, group_keys, requests_8_bits
from hf_lowprec.rounding import dtype_name
from hf_lowprec.rounding.attached_low_bits import are_saved_low_bits, remove_low_bits, restore_saved_low_bits
from hf_lowprec.rounding.modes import AUXILIARY_STATES, StoredState

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup

_REQUIRED = {"lr", "rounding"}
"""Keys that a saved group must have, because the defaults may differ from the values used when it was saved."""

_WRITTEN_BY_TORCH = {
    *("params", "param_names", "differentiable"),
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
}
"""Keys that torch and its schedulers leave in param groups."""


def check_and_load(
    optimizer: Algorithm, state_dict: dict[str, Any], load_by_torch: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Load a state dict into `optimizer`.

    Args:
        optimizer: the optimizer.
        state_dict: the state dict, of any format.
        load_by_torch: `torch.optim.Optimizer.load_state_dict` of this optimizer.

    Returns:
        What the user should know about it, see `_prepare`.

    Raises:
        ValueError: the state dict does not fit. The optimizer is left unchanged.
    """
    loadable: dict[str, Any] = {}
    notes: list[str] = []

    def prepare(_: torch.optim.Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
        prepared, found = _prepare(optimizer, incoming)
        loadable.update(prepared)
        notes.extend(found)
        # torch would cast states to the dtypes of their parameters, and move them to the parameters' devices.
        numbers = {number for _, number in numbered_parameters(optimizer, prepared)}
        return {**prepared, "state": {key: value for key, value in prepared["state"].items() if key not in numbers}}

    def load_states(_: torch.optim.Optimizer) -> None:
        for param, number in numbered_parameters(optimizer, loadable):
            _load_state(optimizer, param, loadable["state"].get(number, {}), loadable.get(LOW_BITS, {}).get(number))

    # The last pre-hook sees what torch will load, and the first post-hook what it has loaded.
    handles = [
        optimizer.register_load_state_dict_pre_hook(prepare),
        optimizer.register_load_state_dict_post_hook(load_states, prepend=True),
    ]
    try:
        load_by_torch(state_dict)
    finally:
        for handle in handles:
            handle.remove()
    optimizer.skipped_before = sum(group.pop(SKIPPED_STEPS, 0) for group in optimizer.param_groups)
    return notes


def _load_state(optimizer: Algorithm, param: Tensor, saved: dict[str, Any], low_bits: dict[str, Any] | None) -> None:
    """Load the state of `param`, or the low bits that its cast has kept.

    Step counts become int64 tensors. Compensations and remainders are parts of the weights, so they are copied, as
    `model.load_state_dict` copies weights. Other states may share memory with the state dict, and so with the optimizer
    that it came from. Low bits that the cast of the model has kept are dropped if the loaded states hold them.
    """
    for name, value in saved.items():
        if name == "step":
            value = torch.tensor(int(value), dtype=torch.int64, device="cpu")
        elif isinstance(value, Tensor):
            moved = value.to(device=optimizer.state_device(param), memory_format=torch.contiguous_format)
            value = copy_apart(value) if moved is value and name in AUXILIARY_STATES else moved
        optimizer.state[param][name] = value
    if low_bits is not None:
        restore_saved_low_bits(param, low_bits)
    elif low_bits_state(saved) is not None:
        remove_low_bits(param)


def _prepare(optimizer: Algorithm, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check that the saved `state_dict` fits `optimizer`, and prepare it for torch's loader.

    State of other libraries is converted, and missing keys get their defaults. The rounding modes are taken from
    `optimizer`, as is each `state_dtype` that is not None, to which states are converted, and the `state_rounding` of
    8-bit states.

    Returns:
        The state dict, and what the user should know about it: one warning each for state of another library, for
        changed options, for states that were converted to another dtype, for a replaced `state_rounding` and for
        changed rounding modes.

    Raises:
        ValueError: `state_dict` does not fit `optimizer`; the message says what is wrong and what would be right.
    """
    _check_containers(state_dict)
    name = algorithm_name(optimizer)
    state_dict = from_saved_form(state_dict)
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    formats = [foreign_format(name, saved, f"param group {k}") for k, saved in enumerate(saved_groups)]
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups, but this {name} has {len(groups)}")
    prepared_groups: list[ParamGroup] = []
    states = dict(state_dict["state"])
    changes: dict[str, None] = {}
    was_nearest = False
    for k, (group, saved, foreign) in enumerate(zip(groups, saved_groups, formats, strict=True)):
        where = f"param group {k}"
        converted = saved if foreign is None else foreign.convert_group(name, group, saved, where)
        prepared = _prepare_group(optimizer, group, converted, where)
        prepared_groups.append(prepared)
        as_saved = {**prepared, "factored": foreign is None and converted.get("factored")}
        was_nearest |= converted.get("state_rounding") == "nearest" != prepared["state_rounding"]
        for param, number in zip(group["params"], saved["params"], strict=True):
            state, owner = states.pop(number, None), f"parameter {number}"
            if state and foreign is not None:
                state = rounded_to_nearest(optimizer, as_saved, param, foreign.convert_state(state))
            if state:  # reading `optimizer.state[param]` of a parameter that has not been stepped leaves an empty dict
                _check_state(optimizer, param, as_saved, state, owner)
                changes |= dict.fromkeys(convert_factored(optimizer, prepared, param, state := dict(state)))
                if group["state_dtype"] is not None:
                    state, to_dtypes = in_own_dtypes(optimizer, prepared, param, state)
                    changes |= dict.fromkeys(to_dtypes)
                states[number] = state
    notes = _notes(optimizer, formats, prepared_groups)
    if changes:
        notes.append(
            f"saved states were converted to the settings of this {name}: {', '.join(changes)}; values were rounded to "
            "nearest"
        )
    if was_nearest:
        notes.append(
            f"steps of this {name} round 16-bit states and compensations stochastically, as its states in 8 bits "
            "require, in place of the saved state_rounding='nearest'"
        )
    own_modes = [{**saved, "rounding": own["rounding"]} for own, saved in zip(groups, prepared_groups, strict=True)]
    return {**state_dict, "state": states, "param_groups": own_modes}, notes


def _check_containers(state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError unless all containers, keys and tensors of `state_dict` are of the types that torch saves.

    Users may keep more in "state", under keys other than numbers of parameters. A number without a parameter would be
    ignored silently, and the parameter that was meant would start with new state.
    """

    def expect(value: Any, types: Any, names: str, what: str) -> None:
        if not isinstance(value, types):
            raise ValueError(f"{what} of the state dict must be {names}, but is of type {type(value).__name__}")

    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"a state dict with the keys {sorted(map(str, state_dict))} is not that of an optimizer, which has 'state' "
            "and 'param_groups'"
        )
    expect(state_dict["param_groups"], list | tuple, "a list", "'param_groups'")
    listed: list[Any] = []
    for k, group in enumerate(state_dict["param_groups"]):
        expect(group, Mapping, "a dict", f"param group {k}")
        for key in group:
            expect(key, str, "strings", f"the keys in param group {k}")
        if "params" not in group:
            raise ValueError(f"param group {k} of the state dict has no 'params', the numbers of its parameters")
        expect(group["params"], list | tuple, "a list", f"'params' in param group {k}")
        for number in group["params"]:
            expect(number, int | str, "numbers", f"'params' in param group {k}")
        listed += group["params"]
    known = set(listed)
    if len(known) < len(listed):
        raise ValueError("'params' in the param groups of the state dict contain a number twice")
    for kind in ("state", LOW_BITS):
        expect(state_dict.get(kind, {}), Mapping, "a dict", repr(kind))
        for number in known & state_dict.get(kind, {}).keys():
            values = state_dict[kind][number]
            where = f"the {kind} of parameter {number}"
            expect(values, Mapping, "a dict", where)
            for name, value in values.items():
                expect(name, str, "strings", f"the keys in {where}")
                if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta):
                    raise ValueError(
                        f"{name} in {where} of the state dict is {value.layout} on {value.device}; it must be a dense "
                        "tensor with values"
                    )
            if kind == LOW_BITS and not are_saved_low_bits(values):
                raise ValueError(f"{where} of the state dict, {sorted(values)}, are damaged")
    for key in state_dict["state"]:
        if isinstance(key, str) and key.isdecimal() and key not in known:
            raise ValueError(f"the state dict has a state for parameter {key!r}, a string as in JSON; make keys int")
        if isinstance(key, int) and key not in known:
            raise ValueError(f"the state dict has a state for parameter {key}, which is in none of its param groups")


def _prepare_group(optimizer: Algorithm, group: ParamGroup, saved: ParamGroup, where: str) -> ParamGroup:
    """Check that the group `saved` fits `group` of `optimizer`, and return it with defaults filled in.

    Raises:
        ValueError: it does not fit.
    """
    name, arguments = algorithm_name(optimizer), group_keys(optimizer)
    if len(group["params"]) != len(saved["params"]):
        raise ValueError(
            f"{where} of the state dict has {len(saved['params'])} parameters, but this {name}'s has "
            f"{len(group['params'])}"
        )
    saved = {key: value for key, value in saved.items() if key != HEADER}
    defaults = {key: value for key, value in keywords(type(optimizer)).items() if key not in _REQUIRED}
    missing = sorted(arguments - saved.keys() - {*ADDED_KEYS})
    if lacking := [key for key in missing if key not in defaults]:
        raise ValueError(
            f"{where} of the state dict has no {', '.join(map(repr, lacking))}, as hf_lowprec.{name} saves it; load a "
            f"complete state dict, or {START_AGAIN}"
        )
    if unknown := sorted(saved.keys() - arguments - group.keys() - _WRITTEN_BY_TORCH - {*ADDED_KEYS}):
        raise ValueError(
            f"{where} of the state dict has {', '.join(map(repr, unknown))}, unknown to {name} and to this "
            "optimizer's group: another optimizer or a newer hf_lowprec saved it. Resume with that one; if you put it "
            "there yourself, put it in the group as well"
        )
    saved = {**{key: defaults[key] for key in missing}, **saved}
    if "factored" in group:
        saved["factored"] = group["factored"]
    if group["state_dtype"] is not None:
        saved["state_dtype"] = group["state_dtype"]
        if requests_8_bits(group):
            saved["state_rounding"] = group["state_rounding"]  # 8-bit states do not allow "nearest"
    check_group(optimizer, saved, f"{where} of the state dict")
    for flag in optimizer.flags:
        if bool(saved[flag]) != bool(group[flag]):
            raise ValueError(
                f"{where} was saved with {flag}={saved[flag]!r} and this {name} has {flag}={group[flag]!r} "
                "there; give the optimizer the same groups in the same order"
            )
    return saved


def _notes(
    optimizer: Algorithm, formats: Sequence[ForeignFormat | None], saved_groups: Sequence[ParamGroup]
) -> list[str]:
    """Return what the user should know about the prepared saved groups.

    There is one warning for state of each other library. Another names replaced options, except for the learning rate
    and what a scheduler cycles with it, since these differ in every resumed run; `ADDED_KEYS`, which users seldom
    choose; and a given `state_dtype`, which is kept. Another is about rounding modes that differ from the groups': the
    optimizer's own are kept, since the user has chosen them, possibly to change the mode.
    """
    name = algorithm_name(optimizer)
    libraries = dict.fromkeys(foreign.library for foreign in formats if foreign is not None)
    options: dict[str, None] = {}
    modes: dict[str, None] = {}
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        cycled = {"betas", "momentum"} if "max_momentum" in saved | group else set()
        for key in sorted(group_keys(optimizer) - {"lr", *ADDED_KEYS} - cycled):
            old, new = _comparable(saved[key]), _comparable(group[key])
            if old == new:
                continue
            if key == "rounding":
                modes[f"{old!r} to {new!r}"] = None
            else:
                options[f"{key}={old!r} (was {new!r})"] = None
    notes = [
        f"the state of {library} was converted for {name}: hyperparameters are those of the state dict, states are "
        "rounded to this optimizer's state_dtype"
        for library in libraries
    ]
    if options:
        of_dtypes = any(option.startswith("state_dtype=") for option in options)
        notes.append(
            f"the state dict that was loaded replaces options of this {name}: {', '.join(options)}; to train with "
            "other values, set them in optimizer.param_groups after loading"
            + ". Saved states keep their dtypes even then; to convert them, set state_dtype before loading"
            * of_dtypes
        )
    if modes and not libraries:
        notes.append(
            f"the rounding mode changes from {' and from '.join(modes)}, as this {name} was built: before the next "
            "step, compensations and remainders are converted, or rounded into the weights for modes that have neither"
        )
    return notes


def _comparable(value: Any) -> Any:
    """Convert `value` to a number, tuple or string: some formats turn tuples into lists and numbers into tensors."""
    return tuple(value) if isinstance(value, list) else value.item() if isinstance(value, Tensor) else value


def _check_state(
    optimizer: Algorithm, param: Tensor, saved_group: ParamGroup, state: dict[str, Any], where: str
) -> None:
    """Raise ValueError unless the saved `state` is one that `param` can have in `saved_group`."""
    existing = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tensors = state_tensors(optimizer, saved_group, param, existing)
    expected = {"step", *(tensor.key for tensor in tensors)}
    owner = f"a {dtype_name(param.dtype)} parameter of {type(optimizer).__name__}"
    required = f"{owner} with rounding={saved_group['rounding']!r} has {sorted(expected)}"
    if missing := sorted(expected - state.keys()):
        raise ValueError(
            f"{where} of the state dict has no {', '.join(map(repr, missing))}; {required}. Load a complete state "
            "dict into a model of the same dtypes, cast with the same keep_fp32 (distributed checkpoints: into an "
            f"optimizer built with rounding={saved_group['rounding']!r}; then change the groups' 'rounding'), or "
            f"{START_AGAIN}"
        )
    # A compensation means that the weight was in 16 bits.
    if param.dtype == torch.float32 and (foreign := sorted(AUXILIARY_STATES.keys() & state.keys())):
        raise ValueError(
            f"{where} of the state dict has {', '.join(map(repr, foreign))}; {required}. The parameter was in 16 bits "
            f"when it was saved: cast the model with the same keep_fp32 as then, or {START_AGAIN}"
        )
    # Between two steps, a group may have got another rounding mode, or another option, whose states stay.
    options = group_keys(optimizer) - {*optimizer.flags}
    options = {key for key in options if isinstance(saved_group.get(key), int | float | None)}
    switched_on = {**saved_group, **{key: saved_group.get(key) or True for key in options}}
    possible = expected | {state.name for state in optimizer.states(switched_on)} | AUXILIARY_STATES.keys()
    if unknown := sorted(map(repr, state.keys() - possible - optimizer.state.get(param, {}).keys())):
        raise ValueError(
            f"{where} of the state dict has {', '.join(unknown)}, unknown to {algorithm_name(optimizer)} and to this "
            "optimizer's state: another optimizer or a newer hf_lowprec saved it. Resume with that one; if you put it "
            "there yourself, put it in optimizer.state[param] as well, or take it out of the state dict"
        )
    step = state["step"].squeeze().tolist() if isinstance(state["step"], Tensor) else state["step"]
    if not (isinstance(step, numbers.Real) and 0 <= step < 2**63 and float(step).is_integer()):  # type: ignore[operator]
        raise ValueError(f"step of {where} is {step!r}; it must be a whole number >= 0 and < 2**63")
    formers = [AUXILIARY_STATES[name] for name in sorted(AUXILIARY_STATES.keys() & state.keys() - expected)]
    tensors += [StoredState.of(former, former.dtype or torch.bfloat16, "nearest") for former in formers]
    for tensor in tensors:
        _check_state_tensor(tensor, param, state[tensor.key], where)


def _check_state_tensor(state: StoredState, param: Tensor, saved: Any, where: str) -> None:
    """Raise ValueError unless `saved` has a shape and a dtype that `state` can have."""
    name, shape = state.key, state.shape_for(param.shape)
    if not isinstance(saved, Tensor):
        raise ValueError(f"{name} of {where} is not a tensor but {saved!r} in the state dict")
    if saved.shape != shape:
        of_scales = "" if state.scale_of is None else f", whose scales have {tuple(shape)}"
        raise ValueError(
            f"{name} of {where} has shape {tuple(saved.shape)} in the state dict; the parameter has "
            f"{tuple(param.shape)}{of_scales}"
        )
    valid: tuple[torch.dtype, ...] = STATE_DTYPES
    fixed = (
        AUXILIARY_STATES[name].dtype if name in AUXILIARY_STATES else None if state.scale_of is None else torch.uint8
    )
    if fixed is not None and not fixed.is_floating_point:
        valid = (fixed,)
    elif fixed is not None or why_not_8_bits(state, param):
        valid = tuple(dtype for dtype in STATE_DTYPES if dtype.is_floating_point)
    if saved.dtype not in valid:
        names = " or ".join(map(dtype_name, valid))
        raise ValueError(f"{name} of {where} has dtype {saved.dtype}; it must be {names}")
