"""The Trainer callback: casts the model, prints the precision report, and logs what rounding has lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_lowprec.casting import CastReport, cast_model, return_float32
from hf_lowprec.casting.cast import cast_like_trained
from hf_lowprec.casting.earlier_casts import runs_under_autocast
from hf_lowprec.casting.fp32_rules import as_entries, matching_entries
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.integrations.accelerate.accelerator import AUTOCAST_OFF, is_evaluation, prepare_accelerator
from hf_lowprec.integrations.accelerate.private_apis import switch_autocast_off
from hf_lowprec.integrations.transformers.optim_args import OptimArgs
from hf_lowprec.integrations.transformers.precision_report import precision_report
from hf_lowprec.integrations.transformers.run_monitor import RunMonitor
from hf_lowprec.integrations.transformers.training_arguments import (
    check_built_optimizer,
    check_gradient_release,
    check_liger,
    check_quantized_weights_are_frozen,
)
from hf_lowprec.monitor.rules import LOST, STANDARD_ERRORS, is_lost
from hf_lowprec.monitor.step_precision import ALL, LOST_SHARES, StepPrecision
from hf_lowprec.optim import LowPrecisionOptimizer, ScheduleFreeAdamW
from hf_lowprec.optim.gradients.collector import collector_of
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.optim.state.fp32_weights import keep_low_bits, reset_low_bits_of_other_weights
from hf_lowprec.reduction import check_replicas
from hf_lowprec.reduction.fsdp2 import Reduction, check_reduction
from hf_lowprec.reduction.grad_accumulation import GradAccumulation, check_grad_accumulation
from hf_lowprec.reduction.reduction_status import ReductionStatus
from hf_lowprec.wrapped_method import wrap_method

if TYPE_CHECKING:  # importing it imports `trainer.py`, which needs this module
    from transformers import Trainer

TRAINERS_CALLBACK = "_hf_lowprec"
"""The attribute of a Trainer that holds the `LowPrecisionCallback` that it was built with."""
LOST_UPDATES = "lost_updates"
NORMS_NEVER_MOVED = "norms_never_moved"
SKIPPED_STEPS = "skipped_steps"
MANY_MICRO_BATCHES = 128
"""With this many micro-batches or more, rounding at each one loses percents of the gradient."""

logger = logging.getLogger(__name__)


class LowPrecisionCallback(TrainerCallback):
    """Trains a model in pure BF16 under `transformers.Trainer`: casts it, sums gradients in FP32, reports and logs.

    With an `optim=` name of hf_lowprec, Trainer adds this callback automatically. Pass an instance as
    `Trainer(callbacks=[…])` to change its arguments, or to train a BF16 model with another optimizer. The model is cast
    in Trainer's constructor, before it is moved to the device.

    If one of our optimizers trains 16-bit weights, training logs get `lost_updates`: the share of that step's weight
    changes that was lost in rounding, from 0 (none) to 1 (all). It is left out where it would be mostly chance, as with
    stochastic rounding at learning rates near zero. If it is clearly above 0 for a part of the model, the log also has
    it by part, as in `lost_updates/attention`. If something else is lost, the log gets `lost_second_moment` and
    `lost_weight_decay`, the shares lost of the second moment's decay and of the weight decay, and `norms_never_moved`,
    the share of norm weights that have not changed since training began. If a part of the training has no effect, a
    single warning says so, with any optimizer. With `skip_nonfinite`, the log gets `skipped_steps`, the number of steps
    skipped so far.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`, as for `cast_model`.
        keep_fp32: modules to keep in FP32, in addition to norms and rotary embeddings, as for `cast_model`.
        report: print the precision report when training begins; log it where the logger `hf_lowprec` shows INFO.
        log_lost_updates: measure the precision of logged steps, log it, and warn. An error in a measurement ends all
            measurements, with a warning; with sharded weights, which the ranks measure together, it is raised.
        grad_accumulation: how the gradients of micro-batches are accumulated, as for `prepare_accelerator`.
        check_replicas_every: compare the weights and states of replicas every this many steps; 0 disables the check.
        reduction: how FSDP2 sums gradients over ranks, as for `prepare_accelerator`.

    `keep_fp32`, `grad_accumulation`, `check_replicas_every` and `reduction` can also be set in `optim_args`. The
    patterns of both `keep_fp32` are combined; for the others, `optim_args` takes precedence.

    Raises:
        ValueError: an argument or the model is not supported (raised when the Trainer is built).
        RuntimeError: the callback was added after the Trainer was built (raised when training begins).
    """

    def __init__(
        self,
        dtype: torch.dtype | str = torch.bfloat16,
        keep_fp32: Sequence[str | type[nn.Module]] = (),
        report: bool = True,
        log_lost_updates: bool = True,
        grad_accumulation: GradAccumulation = "nearest",
        check_replicas_every: int = 0,
        reduction: Reduction = "rank_order",
    ) -> None:
        self.dtype = dtype
        self.keep_fp32 = keep_fp32
        self.report = report
        self.log_lost_updates = log_lost_updates
        self.grad_accumulation = grad_accumulation
        self.check_replicas_every = check_replicas_every
        self.requested_reduction = reduction
        self.begin()

    def begin(self, optim_args: OptimArgs | None = None, keep_low_bits: bool = False) -> None:
        """Start over for a Trainer that is being built.

        Args:
            optim_args: the Trainer's parsed `optim_args`: patterns to add to the callback's own, and values that
                replace the callback's other arguments.
            keep_low_bits: whether the optimizer can use the low bits that the cast rounds off.

        Raises:
            ValueError: `grad_accumulation` or `reduction` is unknown, or `check_replicas_every` is negative.
        """
        options = optim_args or OptimArgs()
        self.entries = (*as_entries(self.keep_fp32), *options.keep_fp32)
        accumulation = self.grad_accumulation if options.grad_accumulation is None else options.grad_accumulation
        self._accumulation = check_grad_accumulation(accumulation)
        self._reduction = check_reduction(self.requested_reduction if options.reduction is None else options.reduction)
        every = options.check_replicas_every
        self._check_every = self.check_replicas_every if every is None else every
        if self._check_every < 0:
            raise ValueError(f"check_replicas_every={self._check_every} is negative; use 0 to disable the check")
        self.reduction: ReductionStatus | None = None
        self.cast_report: CastReport | None = None
        self.keep_low_bits = keep_low_bits
        self.rounding_schedule = options.rounding_schedule
        self._trained: nn.Module | None = None
        self.weights_match_optimizer = False
        """True while a run takes steps: the optimizer's compensations belong to the model's weights."""
        self.saves_checkpoint = False
        """True while the Trainer saves a checkpoint."""
        self.saved_checkpoint: Path | None = None
        """The checkpoint that the Trainer has saved, until its callbacks have run."""
        self._monitor = RunMonitor()

    def cast(self, model: nn.Module, outputs_next_to_loss: bool = True) -> nn.Module:
        """Cast `model` in place; called by the Trainer's constructor, before the model is moved or wrapped.

        Args:
            model: the model to train.
            outputs_next_to_loss: see `return_float32`.
        """
        check_quantized_weights_are_frozen(model)
        for module in filter(runs_under_autocast, model.modules()):  # an earlier Trainer had mixed precision
            extract_model_from_parallel(module, keep_fp32_wrapper=False)
        # Other entries may name modules of a loss around the model, which is checked when the optimizer is created.
        entries = matching_entries(ModuleTree.of(model), self.entries) if outputs_next_to_loss else self.entries
        self.cast_report = cast_model(model, self.dtype, entries, self.keep_low_bits)
        self._trained = model
        return_float32(model, outputs_next_to_loss)
        logger.info("hf_lowprec: %s", self.cast_report)
        return model

    def prepare(self, accelerator: Accelerator) -> None:
        """Let `accelerator` sum gradients in FP32; called by the Trainer's constructor.

        Models that it prepares for evaluation only (references, teachers, judges) are cast like the trained one.

        Args:
            accelerator: as `prepare_accelerator` takes it.
        """
        autocast_off = switch_autocast_off(accelerator)
        self.reduction = prepare_accelerator(accelerator, self._accumulation, self._reduction)
        if autocast_off and self.report:
            self.reduction.notes.append(AUTOCAST_OFF)
        elif autocast_off:
            logger.warning("hf_lowprec: %s", AUTOCAST_OFF)
        wrap_method(accelerator, "prepare_model", self._prepare_model)

    def _prepare_model(
        self, original: Callable, accelerator: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """`Accelerator.prepare_model`: first cast the model if it is only evaluated."""
        if is_evaluation(*args, **kwargs) and model is not self._trained and self.reduction is not None:
            # Other classes have other names.
            entries = matching_entries(ModuleTree.of(model), self.entries if type(model) is type(self._trained) else ())
            report = cast_like_trained(
                model, self._trained, lambda other: cast_model(other, self.dtype, entries, keep_low_bits=False)
            )
            if report.changed:
                self.reduction.notes.append(
                    f"{type(model).__name__} is used only for evaluation and was cast like the trained model"
                )
        return original(accelerator, model, *args, **kwargs)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print or log the precision report.

        Raises:
            RuntimeError: the callback was added after the Trainer was built.
            ValueError: `optim` is one of our names and the optimizer is not one of ours, or Liger cannot run, or the
                optimizer releases gradients that Trainer would accumulate or clip.
        """
        if self.cast_report is None:
            raise RuntimeError(
                "LowPrecisionCallback was added after the Trainer was built; pass it as Trainer(callbacks=[…]) so "
                "that the model is cast before it is moved and wrapped"
            )
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        check_liger(args, self.cast_report.heads)
        check_built_optimizer(args, optimizer)
        optimizer.warns_of_fp32 = False  # `keep_fp32` asks for it, as for adapters
        if collector := collector_of(optimizer):
            if collector.stepped_in_parts:
                check_gradient_release(args, args.max_grad_norm, optimizer.clip)
            collector.start()  # the last run of this Trainer has stopped it
        self._monitor.close()
        watched = optimizer if self.log_lost_updates else None
        self._monitor = RunMonitor(watched, kwargs["model"], warns=state.is_world_process_zero)
        if self.report and state.is_world_process_zero:
            notes = self._notes(args, state, optimizer)
            say = logger.info if logger.isEnabledFor(logging.INFO) and logger.hasHandlers() else print
            say(precision_report(kwargs["model"], optimizer, self.cast_report, notes))
        self.weights_match_optimizer = True

    def _notes(self, args: TrainingArguments, state: TrainerState, optimizer: Any) -> list[str]:
        """Return the last lines of the precision report."""
        notes = self.reduction.lines() if self.reduction else []
        if self._accumulation == "nearest" and args.gradient_accumulation_steps >= MANY_MICRO_BATCHES:
            way_out = "; grad_accumulation='fp32' avoids this for 4 bytes per parameter"
            notes.append(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} rounds gradients once per "
                f"micro-batch{'' if collector_of(optimizer) else way_out}"
            )
        if self.rounding_schedule is not None:
            notes.append(f"rounding modes: {self.rounding_schedule.describe(state.max_steps)}")
        return notes

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the rounding mode of the coming step, if `optim_args` schedules it; measure it, if it will be logged."""
        self._monitor.measure_if_logged(args, state)
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        if self.rounding_schedule is None or not isinstance(optimizer, LowPrecisionOptimizer):
            return
        if self.rounding_schedule.apply(optimizer, state.global_step, state.max_steps):
            mode = self.rounding_schedule.mode(state.global_step, state.max_steps)
            logger.info("hf_lowprec: rounding=%r from step %d on", mode, state.global_step + 1)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Compare the replicas every `check_replicas_every` steps."""
        if self._check_every and (state.global_step + 1) % self._check_every == 0:
            check_replicas(kwargs["model"], kwargs["optimizer"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Warn about findings; add the step's precision and `skipped_steps` to the logs and the state's history."""
        if logs is None or "loss" not in logs:
            return
        additions: dict[str, float] = {}
        if (precision := self._monitor.evaluate_and_warn()) is not None:
            additions |= logged_numbers(precision)
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if isinstance(optimizer, LowPrecisionOptimizer) and optimizer.skip_nonfinite:
            additions[SKIPPED_STEPS] = optimizer.skipped_steps
        logs |= additions
        state.log_history[-1] |= additions

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Stop releasing gradients; warn about findings if there was no log; keep low bits for the next optimizer.

        If the best weights were loaded, they are cast again, since PEFT loads adapters in FP32. Their low bits were
        loaded with them. Compensations that still belong to the last weights are reset, and a warning says so.
        """
        self._monitor.end_run(args, state)
        optimizer = unwrap_optimizer(kwargs["optimizer"])
        _stop_collecting(optimizer)
        self.weights_match_optimizer = False
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        # FSDP2 loads into the existing tensors and keeps their dtypes.
        if best and not any(map(is_sharded, kwargs["model"].parameters())):
            cast_model(kwargs["model"], self.dtype, keep_low_bits=False)
        if not isinstance(optimizer, LowPrecisionOptimizer):
            return
        if isinstance(optimizer, ScheduleFreeAdamW):
            optimizer.eval()
        if not (best and reset_low_bits_of_other_weights(optimizer)):
            keep_low_bits(optimizer)
        elif state.is_world_process_zero:
            logger.warning(
                "hf_lowprec: the best weights, from %s, were loaded in 16 bits, as stored: this run could not read "
                "their compensations or remainders. If the checkpoint has an optimizer state, `hf-lowprec export %s "
                "FOLDER` writes the FP32 weights",
                best,
                best,
            )

    def end_by_error(self, args: TrainingArguments, optimizer: Any) -> None:
        """Clean up after an exception as `on_train_end` would: in a notebook, another Trainer may follow.

        With several ranks, no low bits are kept: reading the weights would wait for collectives that other ranks may
        never join.
        """
        self._monitor.close()
        _stop_collecting(optimizer)
        weights_match_optimizer, self.weights_match_optimizer = self.weights_match_optimizer, False
        if weights_match_optimizer and isinstance(optimizer, LowPrecisionOptimizer) and args.world_size == 1:
            keep_low_bits(optimizer)


def callback_of(trainer: Trainer) -> Any:
    """Return the `LowPrecisionCallback` that `trainer` was built with; None if it is not one of our Trainers."""
    return getattr(trainer, TRAINERS_CALLBACK, None)


def _stop_collecting(optimizer: Any) -> None:
    """Stop taking gradients in later backward passes."""
    if collector := collector_of(optimizer):
        collector.stop()


def logged_numbers(precision: StepPrecision) -> dict[str, float]:
    """Return the numbers for Trainer's logs: `lost_updates`, and others that are above 0 by three standard errors.

    `lost_updates` is left out if three standard errors exceed both it and a half, because it says nothing then. It is
    also given for each part of the model that has lost updates.
    """
    whole, norms = precision.by_kind[ALL], precision.by_kind.get("norms", {})
    parts = {f"{LOST_UPDATES}/{kind}": values for kind, values in precision.by_kind.items() if kind != ALL}
    lost, uncertainty = whole.get(LOST_UPDATES), STANDARD_ERRORS * whole.get(f"{LOST_UPDATES}_error", 0.0)
    numbers = {} if lost is None or uncertainty > max(lost, LOST) else {LOST_UPDATES: lost}
    numbers |= {
        name: values[LOST_UPDATES] for name, values in parts.items() if is_lost(values, LOST_UPDATES, more_than=0.0)
    }
    numbers |= {name: whole[name] for name in LOST_SHARES if is_lost(whole, name, more_than=0.0)}
    return numbers | ({NORMS_NEVER_MOVED: norms["never_moved"]} if is_lost(norms, "never_moved", more_than=0.0) else {})
