"""Measures the precision of a Trainer's run, and warns about problems.

A step is measured if it will be logged; if none will be, one step of the run is measured. Errors in measurements do not
end the run. A Trainer that does not use this package gets a `LostUpdatesWarning`, which warns once if updates are lost
in rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.monitor.rules import FAULTS
from hf_lowprec.monitor.step_precision import StepPrecision
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.param_groups import params_of, unwrap_optimizer
from hf_lowprec.optim.sharding import flat_part, is_sharded
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

if TYPE_CHECKING:
    from transformers import Trainer

_MEASURE_EVERY = 64
"""Steps between measurements if it is not known in advance which step will be logged."""
_MEASURED_LOGS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of the logs whose steps are measured. Later ones are for schedules that begin or end with small rates."""

logger = logging.getLogger(__name__)


class RunMonitor:
    """A `PrecisionMonitor` that stops itself, with one warning, if it raises an error.

    If ranks measure shards together, the error is raised, because the others would wait for a rank that has stopped.
    For an optimizer that is None or has no 16-bit parameters, nothing is measured.

    Args:
        optimizer: the optimizer.
        model: the model.
        warns: whether this rank warns.
        across_ranks: see `PrecisionMonitor`.
        codes: the findings to warn about, each once.
    """

    def __init__(
        self,
        optimizer: Any = None,
        model: nn.Module | None = None,
        warns: bool = True,
        across_ranks: bool = True,
        codes: Collection[str] = FAULTS,
    ) -> None:
        self.measured = False
        """True if a step was measured since the last log."""
        self.found: set[str] = set()
        """The codes of the findings so far."""
        self._codes = set(codes)
        self._warns = warns
        self._ended = False
        self._monitor: PrecisionMonitor | None = None
        params = params_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        self._ranks_measure_together = across_ranks and any(is_sharded(param) or flat_part(param) for param in params)
        if any(param.dtype in LOW_PRECISION_DTYPES for param in params):
            with self._surviving_errors():
                self._monitor = PrecisionMonitor(optimizer, model, across_ranks=across_ranks, on_error=self._end)

    def measure_if_logged(self, args: TrainingArguments, state: TrainerState) -> None:
        """Measure the coming step if it will be logged."""
        step = state.global_step + 1
        if self._monitor is None or self._ended or not _is_to_be_measured(step, args, state, self.measured):
            return
        with self._surviving_errors():
            self._monitor.measure_next_step(step)
            self.measured = True

    def evaluate_and_warn(self) -> StepPrecision | None:
        """Evaluate what was measured since the last log, warn about new findings, and return the numbers."""
        measured, self.measured = self.measured, False
        if self._ended:
            self.close()
        if self._monitor is None or not measured:
            return None
        with self._surviving_errors():
            findings = [finding for finding in self._monitor.findings() if finding.code in self._codes - self.found]
            self.found.update(finding.code for finding in findings)
            for finding in findings if self._warns else ():
                logger.warning("hf_lowprec: %s", finding.message)
            return self._monitor.last
        return None

    def end_run(self, args: TrainingArguments, state: TrainerState) -> None:
        """Stop watching. If the run has had no training log, warn about the step that was measured."""
        if _is_never_logged(args, state):
            self.evaluate_and_warn()
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    @contextmanager
    def _surviving_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Stop measuring. The hooks stay until the next log, because they cannot be removed while they run."""
        if self._ranks_measure_together:
            raise error
        if self._warns and not self._ended:
            logger.warning(
                "hf_lowprec: training continues, but its precision is no longer measured, because of an error: %r",
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        self._ended = True


def _is_never_logged(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the run has no training log, such as one that is shorter than the default of `logging_steps`."""
    if args.logging_first_step:
        return False
    if args.logging_strategy == IntervalStrategy.STEPS:
        return state.logging_steps > state.max_steps
    return bool(args.logging_strategy == IntervalStrategy.NO)


def _is_to_be_measured(step: int, args: TrainingArguments, state: TrainerState, measured: bool) -> bool:
    """Return whether to measure step `step`: if it will be logged or, where that is unknown, once in a while.

    In a run without logs, the step in the middle is measured, because learning rates are small at both ends.

    Args:
        step: the number of the coming step, from 1.
        args: the Trainer's arguments.
        state: the Trainer's state.
        measured: whether a step was measured since the last log.
    """
    if _is_never_logged(args, state):
        return step == (state.max_steps + 1) // 2
    if args.logging_strategy == IntervalStrategy.STEPS:
        return step % max(state.logging_steps, 1) == 0 or (step == 1 and args.logging_first_step)
    return step % _MEASURE_EVERY == 0 or not measured


class LostUpdatesWarning(TrainerCallback):
    """Measures a few steps of a run with 16-bit weights, and warns if their updates are lost.

    It adds nothing to the logs and stops watching after its warning. It measures only rank 0's weights, without
    communication: its shards are typical of all.
    """

    def __init__(self) -> None:
        self._monitor = RunMonitor()
        self._logs = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Watch the optimizer if it steps 16-bit weights."""
        self._monitor.close()
        self._logs = 0
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        # With shards, measured steps of our optimizers wait for the other ranks, which measure nothing.
        waits = isinstance(optimizer, LowPrecisionOptimizer) and any(map(is_sharded, params_of(optimizer)))
        watched = optimizer if state.is_world_process_zero and not waits else None
        self._monitor = RunMonitor(watched, kwargs["model"], across_ranks=False, codes=("updates_lost",))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measure the coming step if it will be logged, and its log is among those that are measured."""
        if self._logs + 1 in _MEASURED_LOGS:
            self._monitor.measure_if_logged(args, state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Warn if the step that was measured lost its updates. Stop after a warning or the last log that counts."""
        if logs is None or "loss" not in logs:
            return
        self._logs += 1
        self._monitor.evaluate_and_warn()
        if self._monitor.found or self._logs >= max(_MEASURED_LOGS):
            self._monitor.close()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Stop watching; a run without logs gets its warning now."""
        self._monitor.end_run(args, state)


def add_lost_updates_warning(trainer: Trainer) -> None:
    """Watch a Trainer that does not use this package, unless another library owns its weights."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_fsdp1 = trainer.is_fsdp_enabled and int(getattr(plugin, "fsdp_version", 1)) == 1
    if not (trainer.is_deepspeed_enabled or is_fsdp1):
        trainer.add_callback(LostUpdatesWarning())
