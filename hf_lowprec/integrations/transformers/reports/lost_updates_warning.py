"""Warns, once, if a Trainer without anything of this package loses its weight updates in rounding."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lowprec.integrations.transformers.reports.run_monitor import RunMonitor, steps_16_bit_weights
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer

_MEASURED_LOGS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of the logs whose steps are measured. Later ones are for schedules that begin or end with small rates."""


class LostUpdatesWarning(TrainerCallback):
    """Measures a few steps of a run with 16-bit weights, and warns if their updates are lost.

    It adds nothing to the logs and stops watching after its warning. The numbers are those of rank 0, without
    communication: sharded weights are the same there in kind.
    """

    def __init__(self) -> None:
        self._monitor: RunMonitor | None = None
        self._logs = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch the optimizer if it steps 16-bit weights."""
        self._stop()
        self._logs = 0
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        if not state.is_world_process_zero or not steps_16_bit_weights(optimizer):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # The steps of our optimizers wait for other ranks, which measure nothing.
        if not (isinstance(optimizer, LowPrecisionOptimizer) and any(map(is_sharded, params))):
            self._monitor = RunMonitor(
                optimizer, kwargs["model"], warns=True, across_ranks=False, codes=("updates_lost",)
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the coming step if it will be logged, and its log is among those that are measured."""
        if self._monitor is not None and self._logs + 1 in _MEASURED_LOGS:
            self._monitor.measure_if_logged(args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Warn if the step that was measured lost its updates. Stop after a warning or the last log that counts."""
        if self._monitor is None or logs is None or "loss" not in logs:
            return
        self._logs += 1
        self._monitor.evaluate_and_warn()
        if self._monitor.found or self._logs >= max(_MEASURED_LOGS):
            self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching; a run without logs has its warning now."""
        if self._monitor is not None and self._monitor.waits_for_end(args, state):
            self._monitor.evaluate_and_warn()
        self._stop()

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None


def add_lost_updates_warning(trainer: Trainer) -> None:
    """Let a Trainer without anything of this package be watched, unless another library owns its weights."""
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and _fsdp_version(trainer) == 1):
        return
    trainer.add_callback(LostUpdatesWarning())


def _fsdp_version(trainer: Trainer) -> int:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return int(getattr(plugin, "fsdp_version", 1))
