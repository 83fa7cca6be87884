"""The steps and learning rates that led to a checkpoint: from `trainer_state.json`, and from the user."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hf_lowprec.integrations.checkpoint_files.json_files import read_json

TRAINER_STATE = "trainer_state.json"


class Hyperparameters(NamedTuple):
    """Hyperparameters of a run as the user gives them; None stands for those of the checkpoint.

    Attributes:
        lr: the learning rate of every step.
        weight_decay: the weight decay of every tensor but norms and biases.
        steps: the number of steps between two checkpoints, or up to one.
        update: the size of an update with which spacings are compared.
    """

    lr: float | None = None
    weight_decay: float | None = None
    steps: int | None = None
    update: float | None = None


class TrainingRecord(NamedTuple):
    """The log of Trainer up to a checkpoint.

    Attributes:
        step: Trainer's global step.
        learning_rates: logged learning rates by step, in order.
    """

    step: int
    learning_rates: dict[int, float]

    def rate_sum(self, first: int, last: int) -> float | None:
        """The sum of the learning rates of the steps `first + 1` to `last`; None if none was logged.

        A step that was not logged counts with the rate of the next one that was, or of the last.
        """
        if not self.learning_rates:
            return None
        total, done = 0.0, first
        for step, rate in self.learning_rates.items():
            reached = min(step, last)
            total += rate * max(0, reached - done)
            done = max(done, reached)
        return total + [*self.learning_rates.values()][-1] * max(0, last - done)

    @property
    def highest_rate(self) -> float | None:
        """The highest learning rate logged; None if none was."""
        return max(self.learning_rates.values(), default=None)


def read_training_record(folder: Path) -> TrainingRecord | None:
    """Read a checkpoint's `trainer_state.json`; None if it has none.

    Raises:
        ValueError: it is damaged.
    """
    if not (folder / TRAINER_STATE).is_file():
        return None
    content = read_json(folder / TRAINER_STATE)
    logs = [entry for entry in content.get("log_history") or [] if "learning_rate" in entry and "step" in entry]
    rates = {int(entry["step"]): float(entry["learning_rate"]) for entry in logs}
    return TrainingRecord(int(content.get("global_step") or 0), dict(sorted(rates.items())))
