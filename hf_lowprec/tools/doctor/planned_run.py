"""A training run that is planned but not started: its learning rates, and how its optimizer rounds."""

from __future__ import annotations

from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler

from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.tools.doctor.update_sizes import PREDICTED_ALGORITHMS

_STOCK = ("adamw_torch", "adamw_torch_fused")
"""Names of transformers whose updates can be predicted: torch's AdamW, which rounds to nearest."""


class PlannedRun(NamedTuple):
    """A planned run.

    Attributes:
        algorithm: one of `PREDICTED_ALGORITHMS`.
        betas: decay rates of the moments.
        learning_rates: of all steps.
        weight_decay: what is part of the update. torch's AdamW, unless fused, decays by a multiplication of its own.
        rounding: the rounding mode.
    """

    algorithm: str
    betas: tuple[float, float]
    learning_rates: list[float]
    weight_decay: float
    rounding: str


def plan_run(
    optim: str, learning_rate: float, steps: int, scheduler: str, warmup_steps: float = 0.0, weight_decay: float = 0.0
) -> PlannedRun:
    """Plan a run from the arguments of `TrainingArguments` with these names.

    Raises:
        ValueError: an argument is invalid, or the sizes of updates or learning rates cannot be known beforehand.
    """
    valid = (*_STOCK, *(name for name in OPTIMIZER_NAMES if name.split("_bf16_")[0] in PREDICTED_ALGORITHMS))
    if optim not in valid:
        raise ValueError(f"--optim {optim}: the sizes of its updates are not predicted; valid are {', '.join(valid)}")
    if not learning_rate > 0:
        raise ValueError(f"--lr {learning_rate:g} is not positive")
    args = TrainingArguments(
        gettempdir(),
        optim=optim,
        learning_rate=learning_rate,
        lr_scheduler_type=scheduler,
        warmup_steps=warmup_steps,
        max_steps=steps,
        weight_decay=weight_decay,
        use_cpu=True,
        report_to=[],
    )
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    group = cls([torch.zeros(1, requires_grad=True)], **kwargs).param_groups[0]
    decays_in_update = optim != "adamw_torch" and group.get("decoupled_weight_decay", True)
    return PlannedRun(
        algorithm=optim.partition("_")[0],
        betas=tuple(group.get("betas") or (group["beta1"] or 0.0, 0.0)),
        learning_rates=_learning_rates(args),
        weight_decay=weight_decay if decays_in_update else 0.0,
        rounding=group.get("rounding", "nearest"),
    )


def _learning_rates(args: TrainingArguments) -> list[float]:
    """The learning rate of each of `args.max_steps` steps, from the scheduler that Trainer would build."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        warmup = args.get_warmup_steps(args.max_steps)
        scheduler: Any = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps)
    except (TypeError, ValueError) as error:
        name = SchedulerType(args.lr_scheduler_type).value
        raise ValueError(f"--scheduler {name}: {error}; name one that needs no arguments") from None
    rates = []
    for _ in range(args.max_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates
