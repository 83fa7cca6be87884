"""A checkpoint with its facts: weights, optimizer states, learning rates, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors
from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.tensor_names import parameter_kinds
from hf_lowprec.tools.inspection.optimizer_states import ParameterState, ParamGroupSettings, read_parameter_states
from hf_lowprec.tools.inspection.tensor_facts import TensorFacts, tensor_facts
from hf_lowprec.tools.inspection.training_record import Hyperparameters, TrainingRecord, read_training_record
from hf_lowprec.tools.user_inputs.model_files import find_model_folder

USUAL_UPDATE = 2e-5
"""The size of an update if neither the user nor the checkpoint says one: a usual learning rate of fine-tuning."""
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. Each tensor is read once, when something is asked about it first.

    Attributes:
        name: as the user named it.
        folder: where its files are.
        weights: its weights.
        states: the optimizer's states; empty without optimizer.
        record: what Trainer logged; None if it was not Trainer who saved it.
        unread: what of it could not be read, and why.
        given: the hyperparameters that the user has named.
        progress: called with the name of each weight before it is read.
    """

    name: str
    folder: Path
    weights: StoredTensors
    states: list[ParameterState]
    record: TrainingRecord | None
    unread: list[str]
    given: Hyperparameters
    progress: Callable[[str], None] = field(compare=False)

    @cached_property
    def tensors(self) -> dict[str, TensorFacts]:
        """The facts of all weights by name."""
        found = {}
        for name in self.weights.infos:
            self.progress(f"{self.name}: {name}")
            found[name] = tensor_facts(self.weights.read(name))
        return found

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The part of the model that each weight belongs to."""
        return parameter_kinds({name: info.shape for name, info in self.weights.infos.items()})

    @cached_property
    def norms(self) -> dict[str, TensorFacts]:
        """The weights and biases of norms, without the statistics of batch norms."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if self.kinds[name] == "norms" and tensor.is_floating and not name.endswith(_STATISTICS)
        }

    @cached_property
    def state_of(self) -> dict[str, ParameterState]:
        """The states of the weights whose names are known."""
        return {state.name: state for state in self.states if state.name in self.weights.infos}

    @property
    def step(self) -> int | None:
        """The number of steps it was trained; None if the files do not tell."""
        counted = [state.step for state in self.states if state.step is not None]
        return max(counted) if counted else self.record.step if self.record else None

    @property
    def update(self) -> float:
        """The size of updates with which spacings are compared: as given, or the highest learning rate, or usual."""
        if self.given.update is not None:
            return self.given.update
        rates = [self.record.highest_rate if self.record else None, *(state.group.initial_lr for state in self.states)]
        return max((rate for rate in rates if rate), default=USUAL_UPDATE)

    def rate_sum(self, group: ParamGroupSettings | None, first: int, last: int) -> float | None:
        """The sum of a group's learning rates of the steps `first + 1` to `last`; None if they are not known.

        Without a log, every step counts with the learning rate at the end, of which a decaying schedule has had more.
        """
        if self.given.lr is not None:
            return self.given.lr * (last - first)
        logged = self.record.rate_sum(first, last) if self.record else None
        if logged is not None:
            return logged
        return group.lr * (last - first) if group and group.lr else None

    def highest_rate(self, group: ParamGroupSettings) -> float | None:
        """The highest learning rate of a group; None if it is not known."""
        if self.given.lr is not None:
            return self.given.lr
        rates = [self.record.highest_rate if self.record else None, group.lr]
        return max((rate for rate in rates if rate), default=None) or group.initial_lr

    def decay(self, name: str, steps: int | None) -> float:
        """The share of a tensor that a decoupled weight decay should have taken away in the last `steps`."""
        state = self.state_of.get(name)
        if not steps or (self.states and (state is None or not state.step)):
            return 0.0
        group, last = state.group if state else None, self.step or steps
        if self.given.weight_decay is not None:  # as Trainer decays
            decay = 0.0 if self.kinds[name] == "norms" or name.endswith("bias") else self.given.weight_decay
        else:
            decay = group.weight_decay if group and group.decoupled_decay else 0.0
        return min(1.0, (self.rate_sum(group, last - steps, last) or 0.0) * decay)

    def was_stepped(self, state: ParameterState) -> bool:
        """Return whether an optimizer has applied gradients to a parameter with a learning rate above zero."""
        steps = state.step if state.step is not None else self.step
        if not state.has_gradients or not steps:
            return False
        rates = self.rate_sum(state.group, 0, steps)
        return rates > 0 if rates is not None else steps > 1 and bool(state.group.initial_lr)


def open_checkpoint(
    name: str, argument: str, given: Hyperparameters, progress: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        name: a folder, or a model on the Hub. Only its safetensors files and configurations are downloaded.
        argument: the argument that it was passed as, for messages.
        given: see `Checkpoint`.
        progress: see `Checkpoint`.

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
    return Checkpoint(name, folder, weights, states, record, notes, given, progress)
