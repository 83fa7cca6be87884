"""Opens what a user names as MODEL: a model folder, a checkpoint with optimizer state, or a model on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.tools.inspection.optimizer_states import ParameterState, read_parameter_states
from hf_lowprec.tools.inspection.training_record import TrainingRecord, read_training_record
from hf_lowprec.tools.user_inputs.model_files import find_model_folder


class Checkpoint(NamedTuple):
    """A checkpoint whose tensors are read when they are asked for.

    Attributes:
        name: as the user named it.
        folder: where its files are.
        weights: its weights.
        states: the optimizer's states; empty without optimizer.
        record: what Trainer logged; None if it was not Trainer who saved it.
        notes: what of it could not be read.
    """

    name: str
    folder: Path
    weights: StoredTensors
    states: list[ParameterState]
    record: TrainingRecord | None
    notes: list[str]

    @property
    def step(self) -> int | None:
        """The number of steps it was trained; None if the files do not tell."""
        counted = [state.step for state in self.states if state.step is not None]
        if counted:
            return max(counted)
        return self.record.step if self.record else None


def open_checkpoint(name: str, argument: str) -> Checkpoint:
    """Open a checkpoint.

    Args:
        name: a folder, or a model on the Hub. Only its safetensors files and configurations are downloaded.
        argument: the argument that it was passed as, for messages.

    Raises:
        InputError: there is no such folder or model, or it has no weights that can be read.
    """
    folder = find_model_folder(name, argument)
    notes: list[str] = []
    try:
        with explain_input_errors(f"{argument}: the weights of {name!r} cannot be read"):
            weights = open_weights(folder)
    except InputError:
        inner = sorted(path.name for path in folder.glob("checkpoint*") if path.is_dir())
        if inner:
            raise InputError(
                f"{argument}: {name!r} is a folder of checkpoints; pass one of {', '.join(inner)}"
            ) from None
        raise
    if not weights.infos:
        raise InputError(f"{argument}: the weight files of {name!r} contain no tensors")
    states: list[ParameterState] = []
    try:
        states = read_parameter_states(folder)
    except InputError as error:
        notes.append(f"{error}; only the weights are inspected.")
    with explain_input_errors(f"{argument}: {name!r}"):
        record = read_training_record(folder)
    return Checkpoint(name, folder, weights, states, record, notes)
