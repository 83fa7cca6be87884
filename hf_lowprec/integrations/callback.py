"""The Trainer callback: casts the model, reports the precision of everything once, logs what rounding did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lowprec.casting import CastReport, cast_model
from hf_lowprec.insight.report import precision_report
from hf_lowprec.insight.updates import lost_updates
from hf_lowprec.optim import LowPrecisionOptimizer

LOST_UPDATES = "lost_updates"


class LowPrecisionCallback(TrainerCallback):
    """Trains a model in pure BF16 under `transformers.Trainer`.

    Our `optim=` names bring it along by themselves. Pass one as `Trainer(callbacks=[…])` to choose its arguments, or to
    train in BF16 with another optimizer. The model is cast while the Trainer is built, before it moves to the device.

    Logged with every log of the Trainer: `lost_updates`, the share of the intended weight changes of that step that
    rounding did not store (0 is none, 1 is all; see `insight.updates`).

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_fp32: patterns of modules to keep in FP32, beside norms and rotary embeddings (see `cast_model`).
        report: print the precision report when training begins.
        log_lost_updates: measure and log `lost_updates`.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        keep_fp32: Sequence[str | type[nn.Module]] = (),
        report: bool = True,
        log_lost_updates: bool = True,
    ) -> None:
        self.dtype = dtype
        self.keep_fp32 = keep_fp32
        self.report = report
        self.log_lost_updates = log_lost_updates
        self.cast_report: CastReport | None = None
        self.notes: list[str] = []
        self._lost: float | None = None

    def cast(self, model: nn.Module) -> nn.Module:
        """Cast `model` in place; called by the Trainer's constructor, before the model is moved or wrapped."""
        self.cast_report = cast_model(model, self.dtype, self.keep_fp32)
        return model

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print the precision report, once per training."""
        if self.cast_report is None:
            raise RuntimeError(
                "LowPrecisionCallback was added after the Trainer was built; pass it as Trainer(callbacks=[…]), so "
                "that the model is cast before it is moved and wrapped"
            )
        self._lost = None
        if self.report and state.is_world_process_zero:
            print(precision_report(kwargs["model"], _unwrapped(kwargs["optimizer"]), self.cast_report, self.notes))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the coming step if it will be logged."""
        step = state.global_step + 1
        due = step % state.logging_steps == 0 if state.logging_steps > 0 else False
        optimizer = _unwrapped(kwargs["optimizer"])
        if not self.log_lost_updates or not isinstance(optimizer, LowPrecisionOptimizer):
            return
        if due or (step == 1 and args.logging_first_step):
            self._lost = lost_updates(optimizer)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measurement to the logs and to the state's history."""
        if logs is not None and "loss" in logs and self._lost is not None:
            logs[LOST_UPDATES] = self._lost
            state.log_history[-1][LOST_UPDATES] = self._lost
            self._lost = None


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer behind accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
