"""Fine-tune with the stock Trainer, and measure how far the norms moved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments, default_data_collator

from hf_lowprec.casting.fp32_rules.norms import is_norm
from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback
from hf_lowprec.optim.optimizer_names import optimizer_factory
from hf_lowprec.tools.demo.training import Settings, cast_whole_model
from hf_lowprec.tools.demo.variants import Variant


@dataclass(frozen=True)
class NormMoves:
    """How far a run moved the weights of the norms.

    Attributes:
        elements: how many there are.
        ones: share that started at exactly 1.
        smallest: magnitude at the start, quantiles 0, 0.5 and 1.
        never_moved: share that is stored with the same bits at the end as at the start.
        same_in_bfloat16: share whose values at start and end round to the same BF16 number.
        displacement: median of |end − start|.
    """

    elements: int
    ones: float
    magnitudes: tuple[float, float, float]
    never_moved: float
    same_in_bfloat16: float
    displacement: float


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        accuracy: on the validation set before and after; empty without a validation set.
        validation_loss: the same.
        training: (step, mean loss since the entry before).
        norms: how far their weights moved.
        state_dtypes: those of the optimizer's states, by name, without step counts.
        seconds: of training.
    """

    accuracy: tuple[float, ...]
    validation_loss: tuple[float, ...]
    training: list[tuple[int, float]]
    norms: NormMoves
    state_dtypes: dict[str, list[str]]
    seconds: float


def fine_tune(
    variant: Variant,
    model: nn.Module,
    train: Any,
    validation: Any,
    settings: Settings,
    folder: Path,
    bfloat16_norms: bool = False,
) -> Outcome:
    """Train `model`, FP32 on entry, in place.

    Args:
        variant: dtype and optimizer.
        model: of transformers, with a head whose labels the data have.
        train: `datasets.Dataset`.
        validation: the same for a classification, or None.
        settings: the settings that all variants share.
        folder: the Trainer's; nothing is written.
        bfloat16_norms: for a variant of ours: `model.to(torch.bfloat16)` and our optimizer without our cast.

    Raises:
        ValueError: `bfloat16_norms` for a variant with `optim_args`, which only an optimizer chosen by name takes.
    """
    if bfloat16_norms and variant.optim_args:
        raise ValueError(f"bfloat16_norms=True ignores optim_args={variant.optim_args!r}; use a variant without them")
    by_name = not bfloat16_norms  # else the same optimizer, handed over as a class: nothing of ours sees the model
    if not (variant.is_ours and by_name):
        cast_whole_model(model, getattr(torch, variant.dtype))
    trainer = Trainer(
        model=model,
        args=_arguments(settings, variant.optim if by_name else "adamw_torch", variant.optim_args, folder),
        train_dataset=train,
        eval_dataset=validation,
        data_collator=default_data_collator,
        compute_metrics=_accuracy,
        callbacks=[LowPrecisionCallback(report=False, log_lost_updates=False)] if variant.is_ours and by_name else [],
        optimizer_cls_and_kwargs=None if by_name else optimizer_factory(variant.optim, lr=settings.learning_rate),
    )
    trainer.remove_callback(PrinterCallback)
    before = norm_weights(model)
    scores = [trainer.evaluate()] if validation is not None else []
    begun = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begun
    scores += [trainer.evaluate()] if validation is not None else []
    return Outcome(
        accuracy=tuple(score["eval_accuracy"] for score in scores),
        validation_loss=tuple(score["eval_loss"] for score in scores),
        training=[(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        norms=norm_moves(before, norm_weights(model)),
        state_dtypes=_state_dtypes(trainer.optimizer),
        seconds=seconds,
    )


def _arguments(settings: Settings, optim: str, optim_args: str | None, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        optim=optim,
        optim_args=optim_args,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        save_strategy="no",
        logging_steps=max(1, settings.steps // 50),
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _state_dtypes(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                found.setdefault(name, set()).add(str(value.dtype).removeprefix("torch."))
    return {name: sorted(dtypes) for name, dtypes in sorted(found.items())}


def norm_weights(model: nn.Module) -> Tensor:
    """The weights of all norms as they are stored, end to end; biases are left out, they start near 0 and move."""
    return torch.cat([m.weight.detach().flatten().cpu() for m in model.modules() if is_norm(m)])


def norm_moves(before: Tensor, after: Tensor) -> NormMoves:
    """Compare the weights of norms.

    Args:
        before: shape (n,), as stored.
        after: the same shape and dtype.
    """
    bits = torch.int16 if before.dtype == torch.bfloat16 else torch.int32
    size, moved = before.float().abs(), (after.double() - before.double()).abs()
    return NormMoves(
        elements=before.numel(),
        ones=float((before == 1).double().mean()),
        magnitudes=(float(size.min()), float(size.median()), float(size.max())),
        never_moved=float((before.view(bits) == after.view(bits)).double().mean()),
        same_in_bfloat16=float((before.bfloat16() == after.bfloat16()).double().mean()),
        displacement=float(moved.median()),
    )
