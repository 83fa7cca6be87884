"""Reads the optimizer states of a checkpoint, parameter by parameter, whichever library saved them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_tensors import (
    ShardedFolder,
    TensorInfo,
    explain_unreadable,
    load_mapped,
)
from hf_lowprec.integrations.export.parameter_names import ParameterNames, read_parameter_names
from hf_lowprec.integrations.export.saved_optimizer import (
    info_in_own_dtype,
    saved_param_groups,
    sharded_param_groups,
)
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer_names import SUFFIXES
from hf_lowprec.optim.state.state_dict_format import HEADER, in_own_dtype
from hf_lowprec.optim.state.states_in_8_bits import SCALE_SUFFIX, codes_in, decoded
from hf_lowprec.optim.state.states_of_other_libraries import COMPENSATIONS, format_of
from hf_lowprec.rounding import dtype_name
from hf_lowprec.tools.export.checkpoint_export import optimizer_files
from hf_lowprec.tools.export.older_checkpoints import usual_orders
from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config

SECOND_MOMENT = "exp_avg_sq"
_STEP = "step"


class ParamGroupSettings:
    """The settings of a saved param group that determine the arithmetic of its steps.

    Args:
        group: the saved param group.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group = {key: value.item() if _is_number(value) else value for key, value in group.items()}
        found = format_of(self._group)
        self._library = "hf_lowprec" if "rounding" in group else found.library if found else None

    @property
    def optimizer(self) -> str:
        """The library or class that saved the group, as far as its keys tell."""
        return self._library or "an unknown optimizer"

    @property
    def lr(self) -> float | None:
        """The learning rate when the checkpoint was saved."""
        return self._number("lr")

    @property
    def initial_lr(self) -> float | None:
        """The learning rate from which a scheduler computes; that of the group if there is no scheduler."""
        return self.lr if self._number("initial_lr") is None else self._number("initial_lr")

    @property
    def weight_decay(self) -> float:
        """The weight decay."""
        return self._number("weight_decay") or 0.0

    @property
    def betas(self) -> tuple[float, float] | None:
        """The decay rates of both moments; None if the keys do not tell."""
        found = self._group.get("betas")
        return (float(found[0]), float(found[1])) if isinstance(found, tuple | list) and len(found) > 1 else None

    @property
    def eps(self) -> float:
        """The number added to the root of the second moment."""
        return self._number("eps") or 0.0

    @property
    def beta2(self) -> float | None:
        """The decay rate of the second moment."""
        return self.betas[1] if self.betas else self._number("beta2")

    @property
    def rounding(self) -> str | None:
        """The rounding mode of 16-bit weights; None if the keys do not tell."""
        if self._library == "hf_lowprec":
            return str(self._group["rounding"])
        if self._library and self._library.startswith("optimi."):
            return "kahan" if self._group.get("kahan_sum") else "nearest"
        return "nearest" if self._library and self._library.startswith("torch.") else None

    @property
    def training_arguments(self) -> tuple[str, dict[str, str]] | None:
        """`optim` and options of `optim_args` that compute and store like this group; None if the keys do not tell."""
        if self._library == "torch.optim.Adam or torch.optim.AdamW" and self.decoupled_decay:
            return "adamw_torch_fused" if self._group.get("fused") else "adamw_torch", {}
        algorithm = self._group.get(HEADER, {}).get("optimizer")
        if algorithm not in ALGORITHMS:
            return None
        suffix = next((suffix for suffix, mode in SUFFIXES.items() if mode == self.rounding), None)
        options = {} if suffix else {"rounding": str(self.rounding)}
        for key, default in keywords(ALGORITHMS[algorithm]).items():
            if key in _STORAGE_OPTIONS and self._group.get(key, default) != default:
                options[key] = _option(self._group[key])
        return f"{algorithm.lower()}_bf16_{suffix or 'split'}", options

    @property
    def rounds_states_to_nearest(self) -> bool:
        """True if 16-bit states are known to be rounded to nearest."""
        if self._library == "hf_lowprec":
            return self._group.get("state_rounding") == "nearest"
        return self._library is not None and self._library.startswith(("torch.", "optimi."))

    @property
    def decays_in_a_step_of_its_own(self) -> bool:
        """True if weights are multiplied by `1 - lr * weight_decay` in their own dtype, before the update."""
        is_torch = self._library is not None and self._library.startswith("torch.optim.Adam")
        return is_torch and self.decoupled_decay and not self._group.get("fused")

    @property
    def decoupled_decay(self) -> bool:
        """True if the decay multiplies the weights; else it is an L2 penalty added to the gradient."""
        if self._library == "hf_lowprec":
            return bool(self._group.get("decoupled_weight_decay", True)) and "momentum" not in self._group
        return bool(self._group.get("decoupled_weight_decay", self._group.get("decouple_wd")))

    def describe(self) -> dict[str, Any]:
        """The settings that matter here, as JSON has them."""
        facts = {
            "optimizer": self.optimizer,
            "rounding": self.rounding,
            "lr": self.lr,
            "initial_lr": self.initial_lr,
            "weight_decay": self.weight_decay,
            "beta2": self.beta2,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _number(self, key: str) -> float | None:
        value = self._group.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_STORAGE_OPTIONS = ("state_dtype", "state_rounding", "decoupled_weight_decay")


def _option(value: Any) -> str:
    """The value of an option of `optim_args` as its string."""
    if isinstance(value, Mapping):
        return "|".join(f"{name}:{_option(dtype)}" for name, dtype in value.items())
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


class ParameterState(NamedTuple):
    """The saved state of one parameter.

    Attributes:
        name: the parameter's name among the stored weights; "parameter k" if it is not known.
        named: whether it is known.
        group: its param group.
        step: how often it was stepped; None if the optimizer does not count.
        infos: shape and dtype of each state that is a tensor of the parameter's shape.
        read: reads the values of one of them; of states in 8 bits, in FP32.
    """

    name: str
    named: bool
    group: ParamGroupSettings
    step: int | None
    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]

    @property
    def compensation(self) -> str | None:
        """The name of its compensation, if it has one."""
        return next((name for name in COMPENSATIONS if name in self.infos), None)


def read_parameter_states(folder: Path) -> list[ParameterState]:
    """Read which states a checkpoint has; their values are read when they are asked for.

    Returns:
        One entry for each parameter that an optimizer holds; empty without optimizer state.

    Raises:
        InputError: the file of an optimizer cannot be read.
    """
    found: list[ParameterState] = []
    with explain_input_errors(f"the optimizer state in {str(folder)!r} cannot be read"):
        names = read_parameter_names(folder)
        stored_names = _stored_names(names)
        for k, file_names in enumerate(optimizer_files(names)):
            of_optimizer = names.optimizers[k] if names and k < len(names.optimizers) else None
            for name in file_names:
                with explain_unreadable(folder / name):
                    if (folder / name).is_file():
                        found += _states_in_file(folder / name, of_optimizer, stored_names)
                    elif (folder / name).is_dir():
                        found += _states_in_folder(folder / name, stored_names)
    return found


def _states_in_file(
    path: Path, names: list[list[str | None]] | None, stored_names: Mapping[str, str]
) -> Iterator[ParameterState]:
    """The states in a file that `torch.save` wrote."""
    saved = load_mapped(path)
    groups, states = saved_param_groups(saved), saved["state"]
    keys = [[*group["params"]] for group in groups]
    if all(isinstance(key, str) for of_group in keys for key in of_group):
        names = [[*of_group] for of_group in keys]
    if names is None:
        names = _names_by_order(path.parent, [[_shape(states.get(key, {})) for key in group] for group in keys])
    for k, group in enumerate(groups):
        settings = ParamGroupSettings(group)
        for position, key in enumerate(keys[k]):
            state = states.get(key, {})
            tensors = {
                name: in_own_dtype(name, value)
                for name, value in state.items()
                if isinstance(value, Tensor) and value.dim()
            }
            infos = {name: TensorInfo(value.shape, value.dtype) for name, value in tensors.items()}
            name = names[k][position] if names else None
            shown = stored_names.get(name, name) if name is not None else f"parameter {key}"
            yield _parameter_state(
                shown, name is not None, settings, _step(state, group), infos, partial(tensors.__getitem__)
            )


def _states_in_folder(folder: Path, stored_names: Mapping[str, str]) -> Iterator[ParameterState]:
    """The states in a folder that `torch.distributed.checkpoint` wrote."""
    stored = ShardedFolder(folder)
    paths: dict[str, list[str]] = {}
    for path in stored.paths():
        if path[:2] == ("optimizer", "state") and len(path) == 4:
            paths.setdefault(path[2], []).append(path[3])

    def read(name: str, state: str) -> Any:
        return in_own_dtype(state, stored.read(("optimizer", "state", name, state)))

    for group in saved_param_groups({"param_groups": sharded_param_groups(stored)}):
        settings = ParamGroupSettings(group)
        for name in group["params"]:
            states = paths.get(name, [])
            found = ((state, stored.info(("optimizer", "state", name, state))) for state in states)
            infos = {state: info_in_own_dtype(state, info) for state, info in found if info is not None and info.shape}
            step = _step({_STEP: read(name, _STEP)} if _STEP in states else {}, group)
            yield _parameter_state(stored_names.get(name, name), True, settings, step, infos, partial(read, name))


def _parameter_state(
    name: str,
    named: bool,
    group: ParamGroupSettings,
    step: int | None,
    infos: dict[str, TensorInfo],
    read: Callable[[str], Tensor],
) -> ParameterState:
    """The saved state of a parameter whose stored tensors are `infos`, those of scales included."""
    codes = codes_in({key: info.dtype for key, info in infos.items()})

    def read_values(state: str) -> Tensor:
        return decoded(read(codes[state]), read(state + SCALE_SUFFIX), state) if state in codes else read(state)

    names = {key: name for name, key in codes.items()}
    scales = {state + SCALE_SUFFIX for state in codes}
    of_its_shape = {names.get(key, key): info for key, info in infos.items() if key not in scales}
    return ParameterState(name, named, group, step, of_its_shape, read_values)


def _step(state: Mapping[str, Any], group: Mapping[str, Any]) -> int | None:
    value = state.get(_STEP, group.get(_STEP) if state else None)
    return None if value is None else int(value)


def _shape(state: Mapping[str, Any]) -> torch.Size | None:
    return next((value.shape for value in state.values() if isinstance(value, Tensor) and value.dim()), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _stored_names(names: ParameterNames | None) -> dict[str, str]:
    """The name in an adapter file of each parameter of an adapter."""
    adapters: Iterable[Mapping[str, str]] = names.adapters.values() if names else ()
    return {parameter: stored for adapter in adapters for stored, parameter in adapter.items()}


def _names_by_order(folder: Path, shapes: list[list[torch.Size | None]]) -> list[list[str | None]] | None:
    """The names of the parameters of each group, if their shapes are those of the model in one of the usual orders."""
    try:
        model = build_empty_model(*load_config(str(folder)))
    except InputError:
        return None
    of_model = {name: param.shape for name, param in model.named_parameters()}
    for names in usual_orders(model):  # type: ignore[arg-type]
        if [*map(len, names)] == [*map(len, shapes)] and all(
            shape in (None, of_model[name])
            for group, group_shapes in zip(names, shapes, strict=True)
            for name, shape in zip(group, group_shapes, strict=True)
        ):
            return [[*group] for group in names]
    return None
