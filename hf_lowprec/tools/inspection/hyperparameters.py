"""The learning rates, weight decay and steps of a run: as the user gives them, else as the checkpoint has them."""

from __future__ import annotations

from typing import NamedTuple

from hf_lowprec.tools.inspection.optimizer_states import ParamGroupSettings
from hf_lowprec.tools.inspection.training_record import TrainingRecord


class Hyperparameters(NamedTuple):
    """Hyperparameters of a run as the user gives them; None stands for those of the checkpoint.

    Attributes:
        lr: the learning rate of every step.
        weight_decay: the weight decay of every tensor but norms and biases.
        steps: the number of steps between two checkpoints, or up to one.
    """

    lr: float | None = None
    weight_decay: float | None = None
    steps: int | None = None

    def rate_sum(
        self, group: ParamGroupSettings | None, record: TrainingRecord | None, first: int, last: int
    ) -> float | None:
        """The sum of the learning rates of the steps `first + 1` to `last`; None if they are not known.

        Without a log, every step counts with the learning rate at the end, of which a decaying schedule has had more.
        """
        if self.lr is not None:
            return self.lr * (last - first)
        logged = record.rate_sum(first, last) if record else None
        if logged is not None:
            return logged
        return group.lr * (last - first) if group and group.lr else None

    def highest_rate(self, group: ParamGroupSettings | None, record: TrainingRecord | None) -> float | None:
        """The highest learning rate of the run; None if it is not known."""
        if self.lr is not None:
            return self.lr
        rates = [record.highest_rate if record else None, group.lr if group else None]
        logged = max((rate for rate in rates if rate), default=None)
        return logged or (group.initial_lr if group else None)

    def decay_rate(self, group: ParamGroupSettings | None, is_decayed: bool) -> float:
        """The weight decay of a tensor, if it is decoupled.

        Args:
            group: its param group, if that is known.
            is_decayed: whether Trainer would decay it.
        """
        if self.weight_decay is not None:
            return self.weight_decay if is_decayed else 0.0
        return group.weight_decay if group and group.decoupled_decay else 0.0
