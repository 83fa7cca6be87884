"""Train one variant of a model with the stock Trainer, and record losses, bytes, lost updates and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback
from hf_lowprec.monitor.memory_estimate import memory_use
from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.monitor.step_precision import ALL, StepPrecision, sum_over_steps
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.tools.demo.text import Blocks
from hf_lowprec.tools.demo.variants import Variant

EVALUATIONS = 10
"""Evaluations in a run, in addition to the one before the first step."""

SAMPLED_STEPS = 25
"""Steps at which lost updates are measured."""
SAMPLED_EVERY = 16
"""Of the weights of torch's AdamW, every sixteenth is measured."""


@dataclass(frozen=True)
class Settings:
    """The settings that all variants of a stage share.

    Attributes:
        steps: optimizer steps.
        batch_size: blocks per step.
        learning_rate: the peak learning rate.
        schedule: `TrainingArguments.lr_scheduler_type`.
        warmup_steps: steps of linear warm-up.
        seed: seed of the data order.
        weight_decay: AdamW's weight decay.
    """

    steps: int
    batch_size: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    seed: int
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Run:
    """The record of one variant in one stage.

    Attributes:
        validation: (step, mean loss in nats per token) on the validation blocks; step 0 is before training.
        training: (step, mean loss in nats per token since the previous entry).
        bytes_per_parameter: of `weights`, `gradients` and optimizer `state`, counted on the tensors after a step.
        lost_updates: share of the weight changes that was lost in rounding in the sampled steps, see `StepPrecision`.
        seconds: time in forward, backward and optimizer steps, without evaluation.
    """

    validation: list[tuple[int, float]]
    training: list[tuple[int, float]]
    bytes_per_parameter: dict[str, float]
    lost_updates: float
    seconds: float

    @property
    def start(self) -> float:
        """Validation loss before the first step."""
        return self.validation[0][1]

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.validation[-1][1]


def train_variant(
    variant: Variant,
    model: nn.Module,
    blocks: Blocks,
    settings: Settings,
    output_dir: Path,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Train a model in place.

    Args:
        variant: dtype and optimizer.
        model: a causal language model of transformers, in FP32.
        blocks: training and validation data.
        settings: the settings that all variants share.
        output_dir: the Trainer's output folder; nothing is written to it.
        on_step: called after every step.
    """
    if not variant.is_ours:
        cast_whole_model(model, getattr(torch, variant.dtype))
    recorder = _Recorder(settings.steps, on_step)
    # Our names need no callback; this one keeps the precision report from being printed for every run.
    quiet = [LowPrecisionCallback(report=False, log_lost_updates=False)] if variant.is_ours else []
    trainer = Trainer(
        model=model,
        args=_arguments(variant, settings, output_dir),
        train_dataset=blocks.train,
        eval_dataset=blocks.validation,
        data_collator=default_data_collator,
        callbacks=[*quiet, recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    history = trainer.state.log_history
    return Run(
        validation=recorder.validation,
        training=[(entry["step"], entry["loss"]) for entry in history if "loss" in entry],
        bytes_per_parameter=recorder.bytes_per_parameter,
        lost_updates=recorder.lost_updates,
        seconds=recorder.seconds,
    )


def cast_whole_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters and buffers except the rotary frequencies, which are wrong in BF16 with any optimizer."""
    frequencies = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if "inv_freq" in name
    ]
    model.to(dtype)
    for module, name, buffer in frequencies:
        setattr(module, name, buffer)


def _arguments(variant: Variant, settings: Settings, output_dir: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output_dir),
        optim=variant.optim,
        optim_args=variant.optim_args,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        eval_strategy="no",  # _Recorder requests evaluations
        eval_on_start=True,
        prediction_loss_only=True,
        save_strategy="no",
        logging_steps=max(1, settings.steps // 50),
        logging_first_step=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


class _Recorder(TrainerCallback):
    """Requests evaluations, counts bytes while gradients and state exist, and measures lost updates and time."""

    def __init__(self, steps: int, on_step: Callable[[], None]) -> None:
        self._monitor: PrecisionMonitor | None = None
        self._measured: list[StepPrecision] = []
        self._before: dict[Tensor, Tensor] = {}
        self._square = self._stored = 0.0
        self.validation: list[tuple[int, float]] = []
        self.bytes_per_parameter: dict[str, float] = {}
        self.seconds = 0.0
        self._on_step = on_step
        self._evaluate_at = {round(steps * k / EVALUATIONS) for k in range(1, EVALUATIONS + 1)}
        self._sample_every = max(1, steps // SAMPLED_STEPS)
        self._started = 0.0

    @property
    def lost_updates(self) -> float:
        """The share of the weight changes of all sampled steps that was lost; NaN if there was none."""
        if self._square:
            return 1 - self._stored / self._square
        measured = [precision for precision in self._measured if "lost_updates" in precision.by_kind[ALL]]
        return sum_over_steps(measured).by_kind[ALL]["lost_updates"] if measured else math.nan

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._sample_every:
            return
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        if isinstance(optimizer, torch.optim.AdamW):
            self._before = {p: _sampled(p) for group in optimizer.param_groups for p in group["params"]}
            return
        if self._monitor is None:
            self._monitor = PrecisionMonitor(optimizer, kwargs["model"])
        self._monitor.measure_next_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        self._add_torch_adamw(optimizer)
        if self._monitor is not None and self._monitor.last is not None and self._monitor.last not in self._measured:
            self._measured.append(self._monitor.last)
        if not self.bytes_per_parameter:
            self.bytes_per_parameter = memory_use(kwargs["model"], optimizer).per_parameter()

    def _add_torch_adamw(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the last step of torch's AdamW has changed with what its formula gives in FP64."""
        for group in optimizer.param_groups if self._before else ():
            for param in group["params"]:
                before, state = self._before[param], optimizer.state[param]
                corrections = [1 - beta ** float(state["step"]) for beta in group["betas"]]
                mean, square = (_sampled(state[name]) / k for name, k in zip(_MOMENTS, corrections, strict=True))
                decayed = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * before
                update = -group["lr"] * decayed
                self._square += float(update.square().sum())
                self._stored += float((update * (_sampled(param) - before)).sum())
        self._before = {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._started
        control.should_evaluate = state.global_step in self._evaluate_at
        self._on_step()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.validation.append((state.global_step, kwargs["metrics"]["eval_loss"]))


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _sampled(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[::SAMPLED_EVERY].double()
