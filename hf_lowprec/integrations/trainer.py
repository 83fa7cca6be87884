"""What makes `TrainingArguments(optim="adamw_bf16_kahan")` enough: names, and two methods of `Trainer` that look for
them.

A Trainer without one of our names or callbacks goes straight through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.quantized import is_quantized
from hf_lowprec.integrations import checkpoints, seams
from hf_lowprec.integrations.accelerator import wrap_method
from hf_lowprec.integrations.arguments import (
    callback_arguments,
    checked_arguments,
    optimizer_arguments,
    optimizer_name,
)
from hf_lowprec.integrations.callback import LowPrecisionCallback
from hf_lowprec.integrations.loading import same_parameters
from hf_lowprec.integrations.manifest import ManifestWriter, records_of_rank
from hf_lowprec.integrations.misuse import warn_of_misuse
from hf_lowprec.integrations.quantization import refuse_frozen
from hf_lowprec.integrations.structure import read_trainer_state
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.hidden_matrices import hidden_matrices
from hf_lowprec.optim.registry import OPTIMIZER_NAMES
from hf_lowprec.optim.validation import keywords
from hf_lowprec.reduction.object_gather import gather_objects
from hf_lowprec.reduction.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_CALLBACK = "_hf_lowprec_callback"
"""Where a Trainer keeps the callback it is built with."""
_MANIFESTS = "_hf_lowprec_manifests"
"""Where a Trainer keeps the writer of its checkpoints' manifests, one per training."""


def register(unpickle: Callable[[str], Any]) -> None:
    """Add our optimizer names to transformers; calling it again changes nothing.

    Args:
        unpickle: gives a name's member of transformers' enum; pickled arguments call it.
    """
    if warn_of_misuse not in LowPrecisionOptimizer.first_step_checks:
        LowPrecisionOptimizer.first_step_checks.append(warn_of_misuse)
    seams.add_optimizer_names(OPTIMIZER_NAMES, _optimizer, unpickle)
    torch.serialization.add_safe_globals([unpickle])
    _wrap_once("__init__", _build)
    _wrap_once("create_accelerator_and_postprocess", _create_accelerator)
    _wrap_once("train", _train)
    _wrap_once(seams.RUN_EPOCH, _run_epoch)
    _wrap_once(seams.SAVE_CHECKPOINT, _save_checkpoint)
    _wrap_once(seams.SAVE_RANDOM_STATE, _save_random_state)
    _wrap_once(seams.LOAD_CHECKPOINT, _load)
    _wrap_once(seams.LOAD_BEST, _load_best)


def _optimizer(context: Any) -> tuple[Any, dict[str, Any]]:
    """What Trainer's dispatch table answers; the model was cast when the Trainer was built."""
    if context.model is not None:
        refuse_frozen(context.model)
        plain = (param for param in context.model.parameters() if not is_quantized(param))
        halves = {param.dtype for param in plain} & set(LOW_PRECISION_DTYPES)
        if not halves:
            raise ValueError(
                f"optim={optimizer_name(context.args)!r} finds a model without any 16-bit parameter: `optim` must be "
                "set before the Trainer is built, so that the model is cast"
            )
        cast_model(context.model, min(halves, key=str))  # what a checkpoint or an adapter brought in since
    cls, kwargs = optimizer_arguments(context.args)
    if context.model is not None and "matrices" in keywords(cls):
        kwargs["matrices"] = hidden_matrices(context.model)
    return cls, kwargs


def _wrap_once(name: str, wrapper: Callable) -> None:
    original = getattr(Trainer, name, None)
    if original is None or getattr(original, "_hf_lowprec", False):
        return

    @functools.wraps(original)
    def method(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, args, kwargs)

    method._hf_lowprec = True  # type: ignore[attr-defined]
    setattr(Trainer, name, method)


def _build(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    given = bound.arguments
    training_args: Any = given.get("args")
    callbacks = list(given.get("callbacks") or [])
    ours = training_args is not None and training_args.optim in OPTIMIZER_NAMES
    callback = _callback(callbacks, ours)
    if callback is None:
        return original(*bound.args, **bound.kwargs)

    if ours:
        _move_to_fields(training_args, checked_arguments(training_args))
    _check_precision(training_args)
    callback.begin(**(callback_arguments(training_args) if ours else {}))
    setattr(trainer, _CALLBACK, callback)
    cast = functools.partial(callback.cast, outputs_next_to_loss=_needs_outputs(trainer))
    if given.get("model") is not None:
        cast(given["model"])
    if given.get("model_init") is not None:
        given["model_init"] = _casting(given["model_init"], cast)
    given["callbacks"] = [*(cb for cb in callbacks if not _is_ours(cb)), callback]
    original(*bound.args, **bound.kwargs)
    if trainer.args.n_gpu > 1:  # not before: Trainer sets it to 1 for a model that is spread over the GPUs
        raise ValueError(
            f"one process with {trainer.args.n_gpu} GPUs (DataParallel) sums gradients in 16 bits; start a process per "
            "GPU: accelerate launch, torchrun --nproc-per-node, or CUDA_VISIBLE_DEVICES=0 for one GPU"
        )
    seams.read_checkpoints_in_float32(trainer)
    if callback.reduction is None:  # a subclass makes its accelerator in a way of its own
        callback.prepare(trainer.accelerator)
    wrap_method(trainer.callback_handler, "on_save", functools.partial(_on_save, trainer))
    # First, so that trackers and the user's callbacks see what it adds to the logs.
    order = trainer.callback_handler.callbacks
    order.insert(0, order.pop(order.index(callback)))


def _is_ours(callback: Any) -> bool:
    return isinstance(callback, LowPrecisionCallback) or callback is LowPrecisionCallback


def _callback(callbacks: list, ours: bool) -> LowPrecisionCallback | None:
    """The user's own callback, or a new one if `optim` is one of our names."""
    given = next(filter(_is_ours, callbacks), None)
    if given is None:
        return LowPrecisionCallback() if ours else None
    return given if isinstance(given, LowPrecisionCallback) else given()


def _check_precision(args: Any) -> None:
    """Raise ValueError if the mixed precision, or an evaluation dtype, cannot go with a 16-bit model."""
    if args is None:
        return
    if args.fp16 or args.mixed_precision not in ("no", "bf16"):
        asked = "fp16=True" if args.fp16 else f"mixed_precision={args.mixed_precision!r}"
        raise ValueError(f"{asked} does not go with pure BF16 training, which replaces autocast and scaling; remove it")
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True would cast the model again, FP32 norms included; it is in 16 bits: remove it"
            )


def _move_to_fields(args: TrainingArguments, kwargs: dict[str, Any]) -> None:
    """What `optim_args` says and Trainer reads from a field of its own goes there.

    Trainer writes its `weight_decay` into the parameter groups, and asks for clipping if its `max_grad_norm` says so.
    """
    if "weight_decay" in kwargs:
        if args.weight_decay not in (0, kwargs["weight_decay"]):
            raise ValueError(
                f"weight_decay={args.weight_decay} and weight_decay={kwargs['weight_decay']} in optim_args differ"
            )
        args.weight_decay = kwargs["weight_decay"]
    if "max_grad_norm" in kwargs:
        args.max_grad_norm = kwargs["max_grad_norm"]


def _create_accelerator(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    callback: LowPrecisionCallback | None = getattr(trainer, _CALLBACK, None)
    if callback is None:
        return original(trainer, *args, **kwargs)
    mixed_precision = trainer.args.mixed_precision
    try:
        trainer.args.mixed_precision = "no"  # where accelerate has made its state, it does not take another one
        original(trainer, *args, **kwargs)
    finally:
        trainer.args.mixed_precision = mixed_precision
    callback.prepare(trainer.accelerator, autocast_off=mixed_precision == "bf16")


def _needs_outputs(trainer: Trainer) -> bool:
    """Whether its loss may be computed from outputs next to which the model has returned a loss already.

    That of transformers' and TRL's own trainers is not: they leave labels out, or take the model's loss.
    """
    library = type(trainer).compute_loss.__module__.partition(".")[0]
    return library not in ("transformers", "trl")


def _casting(model_init: Callable, cast: Callable[[Any], Any]) -> Callable:
    @functools.wraps(model_init)
    def build(*args: Any) -> Any:
        return cast(model_init(*args))

    return build


def _train(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> Any:
    if getattr(trainer, _CALLBACK, None) is None:
        return original(trainer, *args, **kwargs)
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    asked = bound.arguments.get("resume_from_checkpoint")
    chosen = checkpoints.resolve(asked, trainer.args.output_dir)
    bound.arguments["resume_from_checkpoint"] = chosen
    setattr(trainer, _MANIFESTS, ManifestWriter(checkpoints.manifest_of(chosen)))
    with seams.trainer_states_read_by(read_trainer_state) if chosen else nullcontext():
        return original(*bound.args, **bound.kwargs)


def _run_epoch(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Skip the epoch if all steps are done; Trainer would train one more when resumed from the final checkpoint."""
    if getattr(trainer, _CALLBACK, None) is not None and trainer.state.global_step >= trainer.state.max_steps:
        trainer.control.should_training_stop = True
        return
    original(trainer, *args, **kwargs)


def _save_checkpoint(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Trainer's, between an incomplete manifest and the complete one, which is written before older checkpoints
    are deleted."""
    if getattr(trainer, _CALLBACK, None) is None:
        return original(trainer, *args, **kwargs)
    manifests = _manifests(trainer)
    if trainer.args.should_save:
        trial = inspect.signature(original).bind(trainer, *args, **kwargs).arguments["trial"]
        folder, step = seams.checkpoint_folder(trainer, trial), trainer.state.global_step
        manifests.begin(folder, step, unwrap_optimizer(trainer.optimizer))
    trainer.accelerator.wait_for_everyone()  # no rank writes into an older checkpoint that does not say so
    with seams.after_trainer_state(manifests.complete):
        original(trainer, *args, **kwargs)


def _on_save(trainer: Trainer, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The `on_save` of all callbacks on all ranks; what they changed in the checkpoint goes into its manifest."""
    control = original(*args, **kwargs)
    trainer.accelerator.wait_for_everyone()
    _manifests(trainer).complete()
    return control


def _manifests(trainer: Trainer) -> ManifestWriter:
    if not hasattr(trainer, _MANIFESTS):
        setattr(trainer, _MANIFESTS, ManifestWriter())
    return getattr(trainer, _MANIFESTS)


def _save_random_state(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    """A checkpoint with `trainer_state.json`, which rank 0 writes next, has the files of all ranks."""
    original(trainer, *args, **kwargs)
    if getattr(trainer, _CALLBACK, None) is not None:
        folder = inspect.signature(original).bind(trainer, *args, **kwargs).arguments["output_dir"]
        for records in gather_objects(records_of_rank(Path(folder), trainer.args.process_index), "saving a checkpoint"):
            _manifests(trainer).add(records)


def _load(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    """The optimizer, and what FP32 estimates of weights are made of, goes on with the parameters that it has."""
    with same_parameters(trainer.model) if getattr(trainer, _CALLBACK, None) is not None else nullcontext():
        original(trainer, *args, **kwargs)


def _load_best(original: Callable, trainer: Trainer, args: tuple, kwargs: dict[str, Any]) -> None:
    if getattr(trainer, _CALLBACK, None) is not None:
        checkpoints.check_best(Path(trainer.state.best_model_checkpoint))
    _load(original, trainer, args, kwargs)
