"""A training run that is planned but not started: its learning rates, and what its optimizer stores and how."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler

from hf_lowprec.integrations.transformers.optim_args import OptimArgs, optim_args_of, option_strings
from hf_lowprec.integrations.transformers.rounding_schedule import RoundingSchedule
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.state.state_tensors import state_dtype
from hf_lowprec.rounding import MODES
from hf_lowprec.tools.doctor.rounded_updates import COMPENSATION_QUANTA, Quantum, Storage
from hf_lowprec.tools.doctor.update_sizes import ADAMS, PREDICTED_ALGORITHMS
from hf_lowprec.tools.inspection.optimizer_states import read_parameter_states

STOCK = ("adamw_torch", "adamw_torch_fused")
"""Names of transformers whose updates can be predicted: torch's AdamW, which rounds to nearest."""
Betas = tuple[float | None, float | None]
_MEASURED_SCHEDULERS = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""Schedulers whose learning rates depend on losses."""


class PlannedRun(NamedTuple):
    """A planned run.

    Attributes:
        optim: `TrainingArguments.optim`.
        algorithm: one of `PREDICTED_ALGORITHMS`.
        betas: decay rates of the moments.
        learning_rates: of all steps.
        weight_decay: as in TrainingArguments; parameters of one dimension have none.
        decay_is_separate: whether weights are decayed by a multiplication of its own, rounded by itself.
        rounding: the rounding mode, or modes by phases.
        state_rounding: of states, compensations included.
        rounds_second_moment_to_nearest: whether there is a second moment, in 16 bits, rounded to nearest.
        keep_fp32: patterns of what else it keeps in FP32, from `optim_args`.
        is_ours: whether it trains with an optimizer of hf_lowprec, for which the model is cast by `cast_model`.
    """

    optim: str
    algorithm: str
    betas: tuple[float, float]
    learning_rates: list[float]
    weight_decay: float
    decay_is_separate: bool
    rounding: RoundingSchedule
    state_rounding: str
    rounds_second_moment_to_nearest: bool
    keep_fp32: tuple[str, ...]
    is_ours: bool

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.learning_rates)

    def storage(self, mode: str) -> Storage:
        """How updates are stored with `mode`. A mode that the run does not use is predicted with its defaults."""
        declared = MODES[mode]
        if declared.has_compensation:
            is_used = any(phase.mode == mode for phase in self.rounding.phases)
            return Storage(COMPENSATION_QUANTA, stochastic=not is_used or self.state_rounding == "stochastic")
        quantum = 2.0**-16 if declared.auxiliary else 1.0  # with a remainder, all of FP32 is stored
        return Storage((Quantum(quantum, share=1.0),), stochastic=declared.random)


def optimizer_of_checkpoint(folder: Path, optim_args: str | None, betas: Betas) -> dict[str, Any]:
    """The arguments `optim`, `optim_args` and `betas` of `plan_run`, as the run had them that saved a checkpoint.

    Args:
        folder: the checkpoint. Without the state of an optimizer that is known, `optim` is `STOCK[0]`.
        optim_args: what the user has given, which takes precedence.
        betas: likewise.

    Raises:
        ValueError: a file cannot be read.
    """
    group = next((state.group for state in read_parameter_states(folder)), None)
    found = group.training_arguments if group else None
    if group is None or found is None:
        return {"optim": STOCK[0]}
    options = {**found[1], **option_strings(optim_args or "")}
    saved = group.betas or (None, None)
    return {
        "optim": found[0],
        "optim_args": ",".join(map("=".join, options.items())) or None,
        "betas": tuple(value if mine is None else mine for mine, value in zip(betas, saved, strict=True)),
    }


def plan_run(
    optim: str,
    optim_args: str | None,
    learning_rate: float,
    scheduler: str,
    scheduler_kwargs: str | None,
    warmup_steps: float,
    steps: int,
    weight_decay: float,
    betas: Betas,
) -> PlannedRun:
    """Plan a run from the arguments of `TrainingArguments` with these names; `betas` are `adam_beta1` and `adam_beta2`.

    Raises:
        ValueError: an argument is invalid, or the sizes of updates or learning rates cannot be known beforehand.
    """
    names = [name for name in OPTIMIZER_NAMES if name.split("_bf16_")[0] in PREDICTED_ALGORITHMS]
    if optim not in (*STOCK, *names):
        why = (
            "the sizes of its updates are not predicted"
            if optim in OPTIMIZER_NAMES
            else "its updates are not known to be those of Adam or Lion"
        )
        raise ValueError(f"--optim {optim}: {why}; valid are {', '.join((*STOCK, *names))}")
    if not learning_rate > 0:
        raise ValueError(f"--lr {learning_rate:g} is not positive")
    given = {name: value for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True) if value is not None}
    args = TrainingArguments(
        gettempdir(),
        optim=optim,
        optim_args=optim_args,
        learning_rate=learning_rate,
        lr_scheduler_type=_scheduler_type(scheduler),
        lr_scheduler_kwargs=_scheduler_kwargs(scheduler_kwargs),
        warmup_steps=warmup_steps,
        max_steps=steps,
        weight_decay=weight_decay,
        use_cpu=True,
        report_to=[],
        **given,
    )
    is_ours = optim in OPTIMIZER_NAMES
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    group = cls([weight], **kwargs, **({"first_parameter": 0} if is_ours else {})).param_groups[0]
    if group.get("relative_step") or group.get("scale_parameter"):
        raise ValueError(
            f"--optim-args {optim_args}: the sizes of updates depend on steps and weights; leave out relative_step and "
            "scale_parameter"
        )
    options = optim_args_of(args) if is_ours else OptimArgs()
    algorithm = optim.partition("_")[0]
    state_rounding = group.get("state_rounding", "nearest")
    second_moment = state_dtype("exp_avg_sq", weight.dtype, group) if is_ours else weight.dtype
    return PlannedRun(
        optim=optim,
        algorithm=algorithm,
        betas=tuple(group.get("betas") or (group["beta1"] or 0.0, 0.0)),
        learning_rates=learning_rates(args),
        weight_decay=0.0 if algorithm == "adam" and not group["decoupled_weight_decay"] else weight_decay,
        decay_is_separate=optim == "adamw_torch",
        rounding=options.rounding_schedule or RoundingSchedule.parse(group.get("rounding", "nearest")),
        state_rounding=state_rounding,
        rounds_second_moment_to_nearest=algorithm in ADAMS
        and (second_moment, state_rounding) == (torch.bfloat16, "nearest"),
        keep_fp32=options.keep_fp32,
        is_ours=is_ours,
    )


def learning_rates(args: TrainingArguments) -> list[float]:
    """The learning rate of each of `args.max_steps` steps, from the scheduler that Trainer would build."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(args.max_steps),
            num_training_steps=args.max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        name = SchedulerType(args.lr_scheduler_type).value
        raise ValueError(f"--scheduler {name}: {error}; set its arguments with --scheduler-kwargs") from None
    rates = []
    for _ in range(args.max_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def _scheduler_kwargs(text: str | None) -> dict[str, Any] | None:
    try:
        parsed = json.loads(text or "{}")
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f'--scheduler-kwargs {text} is not a JSON object; use one such as {{"num_decay_steps": 200}}')
    return parsed or None


def _scheduler_type(name: str) -> SchedulerType:
    valid = [kind.value for kind in SchedulerType if kind not in _MEASURED_SCHEDULERS]
    if name not in valid:
        known = name in [kind.value for kind in _MEASURED_SCHEDULERS]
        why = " sets learning rates by losses, which are not known before training" if known else " is unknown"
        raise ValueError(f"--scheduler {name}{why}; valid are {', '.join(valid)}")
    return SchedulerType(name)
