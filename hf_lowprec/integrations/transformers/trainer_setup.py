"""Additions to the Trainer methods that set up a run: the constructor, the accelerator, the optimizer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_lowprec.casting import cast_model, return_float32
from hf_lowprec.casting.earlier_casts import cast_dtypes, earlier_entries
from hf_lowprec.casting.fp32_rules import check_entries_match, check_not_rounded, entries_within, fp32_parts
from hf_lowprec.casting.module_tree import ModuleTree, models_in_loss
from hf_lowprec.casting.quantized import is_quantized
from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback
from hf_lowprec.integrations.transformers.checkpoints.trainer_methods import after_callbacks
from hf_lowprec.integrations.transformers.optim_args import OptimArgs, optim_args_of, optimizer_name
from hf_lowprec.integrations.transformers.quantization import check_quantized_weights_are_frozen, check_trainable
from hf_lowprec.integrations.transformers.run_monitor import add_lost_updates_warning
from hf_lowprec.integrations.transformers.trainer_call import TrainerCall, attach, attachment_of
from hf_lowprec.integrations.transformers.training_arguments import (
    REPLACED_FIELDS,
    checked_arguments,
    optimizer_arguments,
)
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithms._hidden_matrices import hidden_matrices
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.state.fp32_weights import uses_low_bits
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method

logger = logging.getLogger(__name__)


def build(call: TrainerCall) -> None:
    """`Trainer.__init__`: add the callback, prepare the accelerator, cast the model before it is moved or wrapped.

    The model is cast when Trainer has accepted all arguments, so that an error leaves it unchanged.

    Raises:
        ValueError: an argument is invalid or incompatible with training in 16 bits.
    """
    trainer, arguments = call.trainer, call.arguments
    args: TrainingArguments | None = arguments.get("args")
    has_our_name = getattr(args, "optim", None) in OPTIMIZER_NAMES
    callbacks = arguments.get("callbacks") or []
    callback = _low_precision_callback(callbacks if isinstance(callbacks, list | tuple) else [], has_our_name)
    if callback is None:
        call.proceed()
        try:
            add_lost_updates_warning(trainer)
        except Exception as error:  # another library may build it in another way
            logger.info("hf_lowprec: this Trainer is not watched for lost updates: %r", error)
        return

    optim_args = OptimArgs()
    if args is not None and has_our_name:
        settings: Sequence[Mapping[str, Any]] = [checked_arguments(args)]
        optim_args = optim_args_of(args)
        _copy_to_fields(args, optim_args.optimizer)
    else:
        settings = _settings_of_given_optimizer(arguments)
    _check_precision(args)
    callback.begin(optim_args, keep_low_bits=any(map(uses_low_bits, settings)))
    attach(trainer, callback)
    cast = functools.partial(callback.cast, outputs_next_to_loss=_needs_outputs(trainer))
    if arguments.get("model") is not None:
        check_quantized_weights_are_frozen(arguments["model"])
    if arguments.get("model_init") is not None:
        model_init = arguments["model_init"]
        arguments["model_init"] = functools.wraps(model_init)(lambda *args: cast(model_init(*args)))
    arguments["callbacks"] = [*(other for other in callbacks if not _is_low_precision_callback(other)), callback]
    moves: list[tuple[Any, ...]] = []
    with (
        private_apis.allowing_checkpoints(args, arguments.get("model")),
        temporarily_wrapped(trainer, private_apis.MOVE_MODEL, lambda *move: moves.append(move)),
    ):
        call.proceed()
    _check_one_gpu(trainer)
    if arguments.get("model") is not None:
        cast(arguments["model"])
    for move, *moved_to in moves:
        move(*moved_to)
    private_apis.read_checkpoints_in_float32(trainer)
    if callback.reduction is None:  # a subclass creates its accelerator in another way
        callback.prepare(trainer.accelerator)
    if type(trainer).create_optimizer is not Trainer.create_optimizer:  # it need not call Trainer's
        wrap_method(trainer, "create_optimizer", _create_optimizer_of_subclass)
    wrap_method(trainer.callback_handler, "on_save", functools.partial(after_callbacks, call.attachment))
    # Ours comes first, so that other callbacks see what it adds to the logs.
    order = trainer.callback_handler.callbacks
    order.insert(0, order.pop(order.index(callback)))


def create_accelerator(call: TrainerCall) -> None:
    """`Trainer.create_accelerator_and_postprocess`: let gradients be summed in FP32, without autocast."""
    call.proceed()
    call.attachment.callback.prepare(call.trainer.accelerator)


def norm_over_meshes(call: TrainerCall) -> Any:
    """Trainer's method that clips gradients on several device meshes: let our optimizers clip inside their step."""
    if not isinstance(unwrap_optimizer(call.trainer.optimizer), LowPrecisionOptimizer):
        return call.proceed()
    parameters, max_norm = call.arguments["model"].parameters(), call.arguments["max_norm"]
    return call.trainer.accelerator.clip_grad_norm_(parameters, max_norm)


def create_optimizer(call: TrainerCall) -> Any:
    """`Trainer.create_optimizer`, called when training begins: catch up with changes since the Trainer was built."""
    _catch_up(call.trainer, call.arguments.get("model"))
    sharded = _builds_ours(call.trainer) and is_sharded_at_load(call.trainer.model)
    with private_apis.one_group_for_all_meshes() if sharded else nullcontext():
        return call.proceed()


def _builds_ours(trainer: Trainer) -> bool:
    cls, _ = getattr(trainer, "optimizer_cls_and_kwargs", None) or (None, None)
    return trainer.args.optim in OPTIMIZER_NAMES or (isinstance(cls, type) and issubclass(cls, LowPrecisionOptimizer))


def get_optimizer_cls_and_kwargs(original: Callable, args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
    """`Trainer.get_optimizer_cls_and_kwargs`, a static method: return those of our optimizer for one of our names.

    Raises:
        ValueError: the arguments are invalid, or the model has nothing to train or was not cast.
    """
    if args.optim not in OPTIMIZER_NAMES:
        return original(args, model)
    cls, kwargs = optimizer_arguments(args)
    if model is not None:
        check_trainable(model)
        if not _low_precision_dtypes(model):
            raise ValueError(
                f"optim={optimizer_name(args)!r} found no 16-bit parameters in the model; set `optim` before the "
                "Trainer is built, so that the model is cast, and leave parameters out of keep_fp32"
            )
        if "matrices" in keywords(cls):
            kwargs["matrices"] = hidden_matrices(model)
    return cls, kwargs


def _create_optimizer_of_subclass(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    _catch_up(trainer, args[0] if args else kwargs.get("model"))
    return original(trainer, *args, **kwargs)


def _catch_up(trainer: Trainer, model: nn.Module | None) -> None:
    """Cast what a checkpoint or the user has added to a cast model, such as adapters. The rest is not changed.

    If `compute_loss` or `training_step` were replaced, they may need outputs in FP32.
    In losses around the model, cast every model, so that it returns FP32. Parameters of the losses stay in FP32.

    Args:
        trainer: the Trainer, about to create its optimizer or to keep one that it was given.
        model: the model that the optimizer is created for, if not `trainer.model`.
    """
    if attachment_of(trainer) is not None and _needs_outputs(trainer) and cast_dtypes(trainer.model):
        return_float32(trainer.model)
    model = trainer.model if model is None else model
    tree, attachment = ModuleTree.of(_with_losses(trainer, model)), attachment_of(trainer)
    callback = LowPrecisionCallback() if attachment is None else attachment.callback
    check_entries_match(tree, set(callback.entries).difference(earlier_entries(model)))
    is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    if is_given or trainer.args.optim not in OPTIMIZER_NAMES:
        return
    if dtypes := _low_precision_dtypes(tree.modules[""]):
        for name, part in models_in_loss(tree, model).items():
            entries = entries_within(tree, name, callback.entries)
            cast_model(part, min(dtypes, key=str), entries, callback.keep_low_bits)
            if part is not model:
                return_float32(part)
        if tree.modules[""] is not model:
            check_not_rounded(tree, fp32_parts(tree, callback.entries), fp32_parts(tree, ()))


def _settings_of_given_optimizer(arguments: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The settings of an hf_lowprec optimizer among the constructor's arguments, by param group; empty without one."""
    optimizer, _ = arguments.get("optimizers") or (None, None)
    if isinstance(optimizer, LowPrecisionOptimizer):
        return optimizer.param_groups
    cls, kwargs = arguments.get("optimizer_cls_and_kwargs") or (None, {})
    return [kwargs] if isinstance(cls, type) and issubclass(cls, LowPrecisionOptimizer) else []


def _with_losses(trainer: Trainer, model: nn.Module) -> nn.Module:
    """The losses that contain `model`, which sentence-transformers trains and keeps in `trainer.loss`; else `model`."""
    loss = getattr(trainer, "loss", None)
    if isinstance(loss, dict) and all(isinstance(one, nn.Module) for one in loss.values()):
        loss = nn.ModuleDict(loss)
    return loss if isinstance(loss, nn.Module) and any(module is model for module in loss.modules()) else model


def _low_precision_dtypes(model: nn.Module) -> set[torch.dtype]:
    plain = (param for param in model.parameters() if not is_quantized(param))
    return {param.dtype for param in plain} & set(LOW_PRECISION_DTYPES)


def _is_low_precision_callback(callback: Any) -> bool:
    return isinstance(callback, LowPrecisionCallback) or callback is LowPrecisionCallback


def _low_precision_callback(callbacks: Sequence[Any], has_our_name: bool) -> LowPrecisionCallback | None:
    """The user's `LowPrecisionCallback` or an instance of the class; a new one if `optim` is one of our names."""
    callback = next(filter(_is_low_precision_callback, callbacks), None)
    if callback is None:
        return LowPrecisionCallback() if has_our_name else None
    return callback if isinstance(callback, LowPrecisionCallback) else callback()


def _check_precision(args: Any) -> None:
    """Raise ValueError if the mixed precision or an evaluation dtype is incompatible with a 16-bit model."""
    if args is None:
        return
    if args.fp16 or args.mixed_precision not in ("no", "bf16"):
        setting = "fp16=True" if args.fp16 else f"mixed_precision={args.mixed_precision!r}"
        raise ValueError(
            f"{setting} is incompatible with pure BF16 training, which replaces autocast and loss scaling; remove it"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True would cast the model again, including its FP32 norms; the model is already in 16 bits, "
                "so remove it"
            )


def _check_one_gpu(trainer: Trainer) -> None:
    """Raise ValueError for DataParallel. Only a built Trainer knows: it has one GPU for a model spread over several."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"one process with {trainer.args.n_gpu} GPUs (DataParallel) sums gradients in 16 bits; start one process "
            "per GPU with accelerate launch or torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES=0 to use one GPU"
        )


def _copy_to_fields(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Copy the options of `optim_args` that Trainer reads from `args` to `args`.

    Trainer writes its `weight_decay` into the parameter groups, and its `max_grad_norm` decides whether it clips.
    Unless told otherwise, its DDP looks for unused parameters, which excludes taking gradients in the backward pass.
    """
    for key, field in REPLACED_FIELDS.items():
        setattr(args, field, options.get(key, getattr(args, field)))
    if "max_grad_norm" in options:
        args.max_grad_norm = options["max_grad_norm"]
    takes_gradients = options.get("gradient_release") or options.get("offload_gradients")
    if takes_gradients and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False


def _needs_outputs(trainer: Trainer) -> bool:
    """Return whether the Trainer may compute its loss from outputs although the model has also returned a loss.

    The Trainers of transformers and TRL do not: they leave out the labels, or use the model's loss. Nor does a
    `training_step` that calls theirs, which returns only the loss.
    """
    code_of_step = getattr(inspect.unwrap(trainer.training_step), "__code__", None)
    calls_theirs = "training_step" in getattr(code_of_step, "co_names", ())
    methods = (trainer.compute_loss, trainer.compute_loss if calls_theirs else trainer.training_step)
    return any(str(method.__module__).partition(".")[0] not in ("transformers", "trl") for method in methods)
