"""Reads the optimizer states of a checkpoint, parameter by parameter, whichever library saved them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import (
    StoredOptimizer,
    read_optimizers,
)
from hf_lowprec.integrations.checkpoint_files.stored_tensors import TensorInfo
from hf_lowprec.integrations.export.parameter_names import read_parameter_names
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer_names import SUFFIXES
from hf_lowprec.optim.state.imported_states import format_of
from hf_lowprec.optim.state.state_dict_format import HEADER
from hf_lowprec.rounding import dtype_name
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.rounding.modes import LOW_BITS_STATES
from hf_lowprec.tools.inspection.tensor_facts import any_nonzero
from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config

SECOND_MOMENT = "exp_avg_sq"


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
        return self._library is not None and self._library.startswith("torch.")

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
        return bool(self._group.get("decoupled_weight_decay"))

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


@dataclass(frozen=True)
class ParameterState:
    """The saved state of one parameter.

    Attributes:
        name: the parameter's name among the stored weights; "parameter k" if it is not known.
        group: its param group.
        step: how often it was stepped; None if the optimizer does not count.
        infos: shape and dtype of each state that is a tensor of the parameter's shape.
        read: reads the values of one of them; of states in 8 bits, in FP32.
    """

    name: str
    group: ParamGroupSettings
    step: int | None
    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each state."""
        return {name: info.dtype for name, info in self.infos.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all its states."""
        return sum(map(self.bytes_of, self.infos))

    def bytes_of(self, name: str) -> int:
        """Bytes of one of them, with its scales if it is in 8 bits."""
        info = self.infos[name]
        scales = info.shape.numel() // BLOCK if info.dtype == torch.int8 else 0
        return info.shape.numel() * info.dtype.itemsize + scales

    @cached_property
    def has_gradients(self) -> bool:
        """True if the parameter has had a gradient that was not zero, as its moments show."""
        names = [name for name in self.infos if name not in LOW_BITS_STATES]
        moment = SECOND_MOMENT if SECOND_MOMENT in names else next(iter(names), None)
        return moment is not None and any_nonzero(self.read(moment))

    @cached_property
    def compensation(self) -> bool:
        """True if the parameter has a compensation with an element that is not zero."""
        name = next((name for name in LOW_BITS_STATES if name in self.infos), None)
        return name is not None and any_nonzero(self.read(name))


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
        adapters: Iterable[Mapping[str, str]] = names.adapters.values() if names else ()
        stored_names = {parameter: stored for adapter in adapters for stored, parameter in adapter.items()}
        for optimizer in read_optimizers(folder, names):
            group_names = optimizer.names or _names_by_order(folder, optimizer)
            for k, group in enumerate(optimizer.parameters):
                settings = ParamGroupSettings(optimizer.param_groups[k])
                for position, stored in enumerate(group):
                    name = group_names[k][position] if group_names else None
                    shown = f"parameter {stored.key}" if name is None else stored_names.get(name, name)
                    found.append(ParameterState(shown, settings, stored.step, stored.infos, stored.read))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _names_by_order(folder: Path, optimizer: StoredOptimizer) -> list[list[str | None]] | None:
    """The names of the parameters of each group, where checkpoints have none, as those of other libraries.

    They are those of the model, grouped as Trainer does or ungrouped, if the shapes are.
    """
    try:
        model = build_empty_model(*load_config(str(folder)))
    except InputError:
        return None
    shapes = {name: param.shape for name, param in model.named_parameters()}
    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    saved = [next((info.shape for info in one.infos.values()), None) for one in chain(*optimizer.parameters)]
    for names in ([[n for n in shapes if n in decayed], [n for n in shapes if n not in decayed]], [[*shapes]]):
        same_sizes = [*map(len, names)] == [*map(len, optimizer.parameters)]
        if same_sizes and all(shape in (None, shapes[n]) for n, shape in zip(chain(*names), saved, strict=True)):
            return [[*of_group] for of_group in names]
    return None
