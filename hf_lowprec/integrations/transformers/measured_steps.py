"""Which steps of a run are measured: those that will be logged, if 16-bit weights are trained; else one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_MEASURE_EVERY = 64
"""Steps between measurements if it is not known in advance which step will be logged."""


def steps_16_bit_weights(optimizer: Any) -> bool:
    """Whether `optimizer` can be watched, and has parameters in 16 bits."""
    return isinstance(optimizer, torch.optim.Optimizer) and any(
        param.dtype in LOW_PRECISION_DTYPES for group in optimizer.param_groups for param in group["params"]
    )


def is_never_logged(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the run has no training log at all, such as one that is shorter than the default of `logging_steps`."""
    if args.logging_first_step:
        return False
    if args.logging_strategy == IntervalStrategy.STEPS:
        return state.logging_steps > state.max_steps
    return bool(args.logging_strategy == IntervalStrategy.NO)


def will_be_logged(step: int, args: TrainingArguments, state: TrainerState, measured: bool) -> bool:
    """Whether to measure step number `step`.

    Of a run without any log, the step in the middle is measured: at both ends of a schedule, learning rates are small.

    Args:
        step: the number of the coming step, from 1.
        args: the Trainer's arguments.
        state: the Trainer's state.
        measured: whether a step was measured since the last log.
    """
    if is_never_logged(args, state):
        return step == (state.max_steps + 1) // 2
    if args.logging_strategy == IntervalStrategy.STEPS:
        return step % max(state.logging_steps, 1) == 0 or (step == 1 and args.logging_first_step)
    return step % _MEASURE_EVERY == 0 or not measured
