"""Warns, once, if a Trainer without anything of this package loses its weight updates in rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lowprec.integrations.transformers.measured_steps import is_never_logged, steps_16_bit_weights, will_be_logged
from hf_lowprec.monitor import PrecisionMonitor
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.reduction.unwrap_optimizer import unwrap_optimizer

_MEASURED_LOGS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of the logs whose steps are measured. Later ones are for schedules that begin or end with small rates."""

logger = logging.getLogger(__name__)


class StockRunMonitor(TrainerCallback):
    """Measures a few steps of a run with 16-bit weights, and warns if their updates vanish.

    It adds nothing to the logs, stops watching after its warning, and no error in it reaches training. The numbers are
    those of rank 0, without communication: sharded weights are the same there in kind.
    """

    def __init__(self) -> None:
        self._monitor: PrecisionMonitor | None = None
        self._logs = 0
        self._measured = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch the optimizer if it steps 16-bit weights."""
        self._attempt(lambda: self._watch(state, unwrap_optimizer(kwargs["optimizer"]), kwargs["model"]))

    def _watch(self, state: TrainerState, optimizer: Any, model: Any) -> None:
        self._stop()
        self._logs, self._measured = 0, False
        if not state.is_world_process_zero or not steps_16_bit_weights(optimizer):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # The steps of our optimizers wait for other ranks, which measure nothing.
        if not (isinstance(optimizer, LowPrecisionOptimizer) and any(map(is_sharded, params))):
            self._monitor = PrecisionMonitor(optimizer, model, across_ranks=False, raise_errors=False)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the coming step if it will be logged, and its log is among those that are measured."""
        step = state.global_step + 1
        due = self._logs + 1 in _MEASURED_LOGS and will_be_logged(step, args, state, self._measured)
        if self._monitor is not None and due:
            self._attempt(lambda: self._measure(step))

    def _measure(self, step: int) -> None:
        if self._monitor is not None:
            self._monitor.measure_next_step(step)
            self._measured = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Warn if the updates of the logged step vanished."""
        if self._monitor is not None and logs is not None and "loss" in logs:
            self._logs += 1
            self._attempt(self._look)
            self._measured = False

    def _look(self) -> None:
        if self._monitor is None or not self._measured:
            return
        found = [finding for finding in self._monitor.findings() if finding.code == "updates_vanish"]
        for finding in found:
            logger.warning("hf_lowprec: %s", finding.message)
        if found or self._logs >= max(_MEASURED_LOGS):
            self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching; a run without logs has its warning now."""
        if is_never_logged(args, state):
            self._attempt(self._look)
        self._stop()

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call `action`; after an error, stop watching."""
        try:
            action()
        except Exception as error:  # a warning is not worth a run
            logger.debug("hf_lowprec: the run is not watched: %r", error)
            self._stop()


def add_stock_run_monitor(trainer: Trainer) -> None:
    """Let a Trainer without anything of this package be watched, unless another library owns its weights."""
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and _fsdp_version(trainer) == 1):
        return
    trainer.add_callback(StockRunMonitor())


def _fsdp_version(trainer: Trainer) -> int:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return int(getattr(plugin, "fsdp_version", 1))
