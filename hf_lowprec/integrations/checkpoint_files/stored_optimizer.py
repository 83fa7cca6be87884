"""Reads saved optimizers, of any library: the states of each parameter, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import (
    SHARDED_STATE,
    LazyTensors,
    ShardedFolder,
    TensorInfo,
    explain_unreadable,
    load_mapped,
)
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME, ParameterNames
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.state.saved_formats import LOW_BITS, from_saved_form, in_own_dtype
from hf_lowprec.optim.state.states import storage_keys, value_in
from hf_lowprec.rounding.attached_low_bits import attached_low_bits, restore_saved_low_bits
from hf_lowprec.rounding.low_bits import fp32_value
from hf_lowprec.rounding.modes import CODE_SUFFIX, LOW_BITS_STATES, SCALE_SUFFIX

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
_FIRST_OPTIMIZER = ("optimizer.pt", "optimizer.bin", SHARDED_STATE)  # Trainer's, accelerate's, that of FSDP2


class StoredParameter(NamedTuple):
    """A parameter as a saved optimizer holds it.

    Attributes:
        group: the options of its param group.
        infos: shape and dtype of each of its states; 8-bit codes have the state's name.
        read: reads one of them; codes are decoded to FP32.
        step: how often it was stepped; None if the optimizer does not count.
        low_bits: the low bits that its cast has kept, as they were saved; None if there are none.
    """

    group: ParamGroup
    infos: dict[str, TensorInfo]
    read: Callable[[str], Tensor]
    step: int | None
    low_bits: dict[str, Any] | None

    @property
    def compensation(self) -> str | None:
        """The name of its compensation or remainder; None if it has neither."""
        return next((name for name in LOW_BITS_STATES if name in self.infos), None)

    @property
    def refines(self) -> bool:
        """True if the optimizer knows more digits of the weight than the checkpoint's weight files contain."""
        return self.compensation is not None or self.low_bits is not None

    def estimate(self, weight: Tensor) -> Tensor:
        """Return the FP32 estimate of the parameter with the stored value `weight`."""
        if self.low_bits is not None:
            restore_saved_low_bits(weight, self.low_bits)
        kept = self.read(self.compensation) if self.compensation else attached_low_bits(weight)
        return weight.float() if kept is None else fp32_value(weight, kept.to(weight.device))


class StoredOptimizer(NamedTuple):
    """A saved optimizer.

    Attributes:
        param_groups: the options of each param group.
        parameters: the parameters of all of them.
        names: the names of the parameters; None if the state dict only numbers them.
    """

    param_groups: list[ParamGroup]
    parameters: list[StoredParameter]
    names: list[str | None] | None

    @property
    def is_ours(self) -> bool:
        """True if one of hf_lowprec's optimizers saved it."""
        return any("rounding" in group for group in self.param_groups)

    @property
    def refines(self) -> bool:
        """True if it has compensations, remainders, or low bits."""
        return any(parameter.refines for parameter in self.parameters)


def read_optimizers(folder: Path, names: ParameterNames) -> list[StoredOptimizer]:
    """Read all optimizers in a checkpoint. Tensors are read only when asked for.

    Args:
        folder: the checkpoint.
        names: the names of their parameters, as far as the checkpoint has them.

    Raises:
        ValueError: see `read_optimizer`.
    """
    found = []
    for k, of_optimizer in enumerate(names.optimizers or [None]):
        for name in (f"optimizer_{k}.bin", f"optimizer_{k}") if k else _FIRST_OPTIMIZER:
            if (folder / name).exists():
                found.append(read_optimizer(folder / name, of_optimizer))
    return found


def read_optimizer(path: Path, names: list[list[str | None]] | None = None) -> StoredOptimizer:
    """Read a state dict that `torch.save` or, to a folder, `torch.distributed.checkpoint` wrote.

    Args:
        path: the file or folder.
        names: the names of the parameters of each group; None if they are unknown. They are not needed if the state
            dict has names instead of numbers, as under FSDP2.

    Raises:
        ValueError: it cannot be read, is not the state dict of an optimizer, or `names` belong to another one.
    """
    with explain_unreadable(path):
        if path.is_dir():
            folder = ShardedFolder(path)
            saved = folder.outline("optimizer")
            groups = [group for _, group in sorted(saved.get(_GROUPS, {}).items())]
            states = {_STATE: saved.get(_STATE, {}), _GROUPS: groups}
            return _stored_optimizer(states, lambda key, state: folder.read(("optimizer", _STATE, key, state)), None)
        saved = load_mapped(path)
        if not isinstance(saved, dict) or not {_STATE, _GROUPS} <= saved.keys():
            raise ValueError(f"{path} is not the state dict of an optimizer, which has 'state' and 'param_groups'")
        sizes = [len(group["params"]) for group in saved[_GROUPS]]
        if names is not None and [*map(len, names)] != sizes:
            raise ValueError(
                f"{path.parent / PARAMETERS_NAME} names {[*map(len, names)]} parameters in its groups, but {path.name} "
                f"has {sizes}: they are from different checkpoints"
            )
        return _stored_optimizer(
            saved, lambda key, state: saved[_STATE][key][state], None if names is None else [*chain(*names)]
        )


def _stored_optimizer(
    saved: Mapping[str, Any], read: Callable[[Any, str], Tensor], names: list[str | None] | None
) -> StoredOptimizer:
    """Return the optimizer with the state dict `saved`, whose tensors may lack values; `read` returns them."""
    groups = from_saved_form({_GROUPS: saved[_GROUPS]})[_GROUPS]

    def parameter(key: Any, group: ParamGroup) -> StoredParameter:
        state = saved[_STATE].get(key, {})
        step = state.get(_STEP, group.get(_STEP) if state else None)
        return StoredParameter(
            group,
            *_states(state, partial(read, key)),
            None if step is None else int(step),
            None if state else saved.get(LOW_BITS, {}).get(key),
        )

    keys = [*chain.from_iterable(group["params"] for group in groups)]
    parameters = [parameter(key, group) for group in groups for key in group["params"]]
    return StoredOptimizer(groups, parameters, keys if all(isinstance(key, str) for key in keys) else names)


def _states(state: Mapping[str, Any], read: Callable[[str], Tensor]) -> LazyTensors:
    """Return the states of a parameter with the entry `state`, whose values `read` returns."""
    tensors = {key: in_own_dtype(key, value) for key, value in state.items() if isinstance(value, Tensor)}
    is_number = all(tensor.dim() == 0 for tensor in tensors.values())
    infos = {
        key: TensorInfo(tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
        if key != _STEP and (is_number or tensor.dim())  # other numbers count something
    }
    names = {key: name for key in infos if (name := key.removesuffix(CODE_SUFFIX)) + SCALE_SUFFIX in infos}
    scales = {name + SCALE_SUFFIX for name in names.values()}

    def read_values(name: str) -> Tensor:
        return value_in({key: in_own_dtype(key, read(key)) for key in storage_keys(name, infos.keys())}, name)

    infos = {names.get(key, key): info for key, info in infos.items() if key not in scales}
    return LazyTensors(infos, read_values)
