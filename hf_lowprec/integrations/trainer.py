"""What makes `TrainingArguments(optim="adamw_bf16_kahan")` enough: names, and two methods of `Trainer` that look for
them.

A Trainer without one of our names or callbacks goes straight through.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_lowprec.integrations import checkpoints, seams
from hf_lowprec.integrations.arguments import keep_fp32_patterns, optimizer_arguments
from hf_lowprec.integrations.callback import LowPrecisionCallback
from hf_lowprec.optim.registry import OPTIMIZER_NAMES

logger = logging.getLogger(__name__)


def register() -> None:
    """Add our optimizer names to transformers; calling it again changes nothing."""
    seams.add_optimizer_names(OPTIMIZER_NAMES, lambda context: optimizer_arguments(context.args))
    _wrap_once("__init__", _build)
    _wrap_once("train", _train)


def _wrap_once(name: str, wrapper: Callable) -> None:
    original = getattr(Trainer, name)
    if getattr(original, "_hf_lowprec", False):
        return

    @functools.wraps(original)
    def method(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, args, kwargs)

    method._hf_lowprec = True  # type: ignore[attr-defined]
    setattr(Trainer, name, method)


def _build(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    given = bound.arguments
    callback = _callback(given.get("args"), given.get("callbacks"))
    if callback is not None:
        _without_autocast(given.get("args"), callback)
        if given.get("model") is not None:
            callback.cast(given["model"])
        if given.get("model_init") is not None:
            given["model_init"] = _casting(given["model_init"], callback)
        given["callbacks"] = [*(cb for cb in given.get("callbacks") or [] if cb is not callback), callback]
    original(*bound.args, **bound.kwargs)


def _callback(args: TrainingArguments | None, callbacks: list | None) -> LowPrecisionCallback | None:
    """The user's own callback, or a new one if `optim` is one of our names."""
    ours = args is not None and args.optim in OPTIMIZER_NAMES
    if ours:
        optimizer_arguments(args)  # what is wrong with optim_args is said now, not at the first step
    for callback in callbacks or []:
        if callback is LowPrecisionCallback:
            callbacks.remove(callback)  # type: ignore[union-attr]
            return LowPrecisionCallback()
        if isinstance(callback, LowPrecisionCallback):
            return callback
    return LowPrecisionCallback(keep_fp32=keep_fp32_patterns(args)) if ours else None


def _without_autocast(args: TrainingArguments | None, callback: LowPrecisionCallback) -> None:
    """Pure BF16 needs no autocast, and under FSDP2 accelerate's autocast would upcast every parameter to FP32."""
    if args is None:
        return
    if args.fp16 or args.mixed_precision == "fp16":
        raise ValueError(
            "fp16=True asks for FP16 autocast with loss scaling, which pure BF16 training replaces; remove fp16"
        )
    if args.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"mixed_precision={args.mixed_precision!r} does not combine with pure BF16 training; use 'no'")
    if args.mixed_precision == "bf16":
        args.mixed_precision = "no"
        callback.notes.append("mixed precision: 'bf16' was asked for and is off; the model itself is BF16")
    if args.bf16_full_eval:
        args.bf16_full_eval = False
        callback.notes.append("bf16_full_eval: off; the model is BF16 already, and its FP32 norms stay FP32")
    for note in callback.notes:
        logger.warning("hf_lowprec: %s", note)


def _casting(model_init: Callable, callback: LowPrecisionCallback) -> Callable:
    @functools.wraps(model_init)
    def build(*args: Any) -> Any:
        return callback.cast(model_init(*args))

    return build


def _train(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    if any(isinstance(callback, LowPrecisionCallback) for callback in trainer.callback_handler.callbacks):
        asked = bound.arguments.get("resume_from_checkpoint")
        if asked:
            bound.arguments["resume_from_checkpoint"] = checkpoints.resolve(asked, trainer.args.output_dir)
    return original(*bound.args, **bound.kwargs)
