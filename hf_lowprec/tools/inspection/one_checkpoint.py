"""The facts of one checkpoint: a pass over its weights, and a look at each optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_lowprec.optim.state.states_in_8_bits import holds_codes
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.tensor_names import parameter_kinds
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.optimizer_states import SECOND_MOMENT, ParameterState, ParamGroupSettings
from hf_lowprec.tools.inspection.tensor_facts import CHUNK, TensorFacts, tensor_facts
from hf_lowprec.tools.inspection.training_record import TrainingRecord

USUAL_UPDATE = 2e-5
"""The size of an update if neither the user nor the checkpoint says one: a usual learning rate of fine-tuning."""
_INITIAL_VALUES = (0.0, 1.0)
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class StateFacts:
    """The optimizer state of one parameter.

    Attributes:
        name: the parameter's name among the weights, or "parameter k".
        group: its param group.
        step: how often it was stepped; None if it is not known.
        dtypes: the dtype of each state.
        parameters: number of elements of each state; 0 without states.
        has_gradients: whether any gradient has reached it: its moments are not all zero.
        compensation: whether it has a compensation that is not zero everywhere.
    """

    name: str
    group: ParamGroupSettings
    step: int | None
    dtypes: dict[str, torch.dtype]
    parameters: int
    has_gradients: bool
    compensation: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all its states."""
        return sum(map(self.bytes_of, self.dtypes))

    def bytes_of(self, name: str) -> int:
        """Bytes of one of them, with its scales if it is in 8 bits."""
        dtype = self.dtypes[name]
        return self.parameters * dtype.itemsize + (self.parameters // BLOCK if holds_codes(name, dtype) else 0)


@dataclass(frozen=True)
class CheckpointFacts:
    """One checkpoint in numbers.

    Attributes:
        name: as the user named it.
        folder: where its files are.
        tensors: the weights by name.
        kinds: the part of the model that each belongs to.
        states: the optimizer's states; empty without optimizer.
        step: the number of steps it was trained; None if the files do not tell.
        record: what Trainer logged, if it was Trainer who saved it.
        update: the size of the updates with which spacings are compared.
        notes: what could not be read.
    """

    name: str
    folder: Path
    tensors: dict[str, TensorFacts]
    kinds: dict[str, str]
    states: list[StateFacts]
    step: int | None
    record: TrainingRecord | None
    update: float
    notes: list[str]

    def norms(self) -> dict[str, TensorFacts]:
        """The weights and biases of norms, without the statistics of batch norms."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if self.kinds[name] == "norms" and tensor.is_floating and not name.endswith(_STATISTICS)
        }

    def state_of(self) -> dict[str, StateFacts]:
        """The states of the weights whose names are known."""
        return {state.name: state for state in self.states if state.name in self.tensors}


def at_initial_value(tensor: TensorFacts) -> bool:
    """Return whether all elements are exactly 1, or exactly 0 as in biases and norms that multiply by `1 + weight`."""
    return tensor.constant in _INITIAL_VALUES


def is_decayed_by_trainer(name: str, kind: str) -> bool:
    """Return whether Trainer would decay a tensor: neither norms nor biases."""
    return kind != "norms" and not name.endswith("bias")


def inspect_checkpoint(
    checkpoint: Checkpoint, update: float | None, progress: Callable[[str], None] = lambda name: None
) -> CheckpointFacts:
    """Read every tensor of a checkpoint once.

    Args:
        checkpoint: the checkpoint.
        update: the size of an update; None for the highest learning rate in the checkpoint, or `USUAL_UPDATE`.
        progress: called with the name of each tensor before it is read.
    """
    tensors: dict[str, TensorFacts] = {}
    for name in checkpoint.weights.infos:
        progress(name)
        tensors[name] = tensor_facts(checkpoint.weights.read(name))
    states = [_state_facts(state) for state in checkpoint.states]
    return CheckpointFacts(
        checkpoint.name,
        checkpoint.folder,
        tensors,
        parameter_kinds({name: tensor.shape for name, tensor in tensors.items()}),
        states,
        checkpoint.step,
        checkpoint.record,
        _usual_update(checkpoint) if update is None else update,
        checkpoint.notes,
    )


def _usual_update(checkpoint: Checkpoint) -> float:
    """The highest learning rate in the checkpoint, or `USUAL_UPDATE`."""
    rates = [checkpoint.record.highest_rate if checkpoint.record else None]
    rates += [state.group.initial_lr for state in checkpoint.states]
    return max((rate for rate in rates if rate), default=USUAL_UPDATE)


def _state_facts(state: ParameterState) -> StateFacts:
    compensation = state.compensation
    moment = SECOND_MOMENT if SECOND_MOMENT in state.infos else next((n for n in state.infos if n != compensation), "")
    return StateFacts(
        state.name,
        state.group,
        state.step,
        {name: info.dtype for name, info in state.infos.items()},
        next((info.shape.numel() for info in state.infos.values()), 0),
        bool(moment) and _any_nonzero(state.read(moment)),
        compensation is not None and _any_nonzero(state.read(compensation)),
    )


def _any_nonzero(tensor: Tensor) -> bool:
    return any(bool(chunk.count_nonzero()) for chunk in tensor.reshape(-1).split(CHUNK))
