"""Sets up the runs of a Trainer, and wraps the methods of `Trainer` that are listed at the end, with the reasons.

A Trainer without one of our names or callbacks runs its original methods.
"""

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
from hf_lowprec.integrations.transformers.callback import TRAINERS_CALLBACK, LowPrecisionCallback, callback_of
from hf_lowprec.integrations.transformers.checkpoints import load, resume, save
from hf_lowprec.integrations.transformers.optim_args import OptimArgs, optim_args_of, optimizer_name
from hf_lowprec.integrations.transformers.run_monitor import add_lost_updates_warning
from hf_lowprec.integrations.transformers.training_arguments import (
    check_one_gpu,
    check_precision,
    check_quantized_weights_are_frozen,
    check_trainable,
    checked_arguments,
    copy_to_fields,
    optimizer_arguments,
)
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithms._hidden_matrices import hidden_matrices
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.state.fp32_weights import uses_low_bits
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method

logger = logging.getLogger(__name__)


def build(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """`Trainer.__init__`: add the callback, prepare the accelerator, cast the model before it is moved or wrapped.

    The model is cast when Trainer has accepted all arguments, so that an error leaves it unchanged.

    Raises:
        ValueError: an argument is invalid or incompatible with training in 16 bits.
    """
    positions = private_apis.constructor_arguments(original)[: len(args)] if args else []
    arguments = kwargs | dict(zip(positions, args, strict=False))
    training_arguments: TrainingArguments | None = arguments.get("args")
    callbacks = arguments.get("callbacks") or []
    given = [callback for callback in callbacks if _is_ours(callback)] if isinstance(callbacks, list | tuple) else []
    has_our_name = getattr(training_arguments, "optim", None) in OPTIMIZER_NAMES
    if not given and not has_our_name:
        original(trainer, *args, **kwargs)
        try:
            add_lost_updates_warning(trainer)
        except Exception as error:  # another library may build it differently
            logger.info("hf_lowprec: this Trainer is not watched for lost updates: %r", error)
        return

    callback = given[0] if given else LowPrecisionCallback
    callback = callback() if isinstance(callback, type) else callback
    optim_args = OptimArgs()
    if training_arguments is not None and has_our_name:
        settings: Sequence[Mapping[str, Any]] = [checked_arguments(training_arguments)]
        optim_args = optim_args_of(training_arguments)
        copy_to_fields(training_arguments, optim_args.optimizer)
    else:
        settings = _settings_of_given_optimizer(arguments)
    check_precision(training_arguments)
    callback.begin(optim_args, keep_low_bits=any(map(uses_low_bits, settings)))
    setattr(trainer, TRAINERS_CALLBACK, callback)
    cast = functools.partial(callback.cast, outputs_next_to_loss=_needs_outputs(trainer))
    model, model_init = arguments.get("model"), arguments.get("model_init")
    if model is not None:
        check_quantized_weights_are_frozen(model)
    if model_init is not None:
        arguments["model_init"] = functools.wraps(model_init)(lambda *args: cast(model_init(*args)))
    arguments["callbacks"] = [*(other for other in callbacks if not _is_ours(other)), callback]
    moves: list[tuple[Any, ...]] = []
    with (
        private_apis.allowing_checkpoints(training_arguments, model),
        temporarily_wrapped(trainer, private_apis.MOVE_MODEL, lambda *move: moves.append(move)),
    ):
        # Positional arguments stay positional. Those also passed by name stay so, and Python raises its error.
        named = {name: value for name, value in arguments.items() if name not in positions}
        original(trainer, *map(arguments.get, positions), *args[len(positions) :], **kwargs | named)
    check_one_gpu(trainer)
    if model is not None:
        cast(model)
    for move, *moved_to in moves:
        move(*moved_to)
    private_apis.read_checkpoints_in_float32(trainer)
    if callback.reduction is None:  # a subclass creates its accelerator differently
        callback.prepare(trainer.accelerator)
    if type(trainer).create_optimizer is not Trainer.create_optimizer:  # it need not call Trainer's
        wrap_method(trainer, "create_optimizer", create_optimizer)
    wrap_method(trainer.callback_handler, "on_save", functools.partial(save.after_callbacks, callback))
    # Ours comes first, so that other callbacks see what it adds to the logs.
    order = trainer.callback_handler.callbacks
    order.insert(0, order.pop(order.index(callback)))


def create_accelerator(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """`Trainer.create_accelerator_and_postprocess`: let gradients be summed in FP32, without autocast."""
    original(trainer, *args, **kwargs)
    callback_of(trainer).prepare(trainer.accelerator)


def norm_over_meshes(original: Callable, trainer: Trainer, model: nn.Module, max_norm: float) -> Any:
    """Clip gradients on several device meshes, instead of Trainer's method: our optimizers clip inside their step."""
    if not isinstance(unwrap_optimizer(trainer.optimizer), LowPrecisionOptimizer):
        return original(trainer, model, max_norm)
    return trainer.accelerator.clip_grad_norm_(model.parameters(), max_norm)


def create_optimizer(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.create_optimizer`, called when training begins: handle changes since the Trainer was built."""
    _catch_up(trainer, args[0] if args else kwargs.get("model"))
    cls, _ = getattr(trainer, "optimizer_cls_and_kwargs", None) or (None, None)
    is_ours = trainer.args.optim in OPTIMIZER_NAMES or _is_our_optimizer(cls)
    sharded = is_ours and is_sharded_at_load(trainer.model)
    with private_apis.one_group_for_all_meshes() if sharded else nullcontext():
        return original(trainer, *args, **kwargs)


def _is_our_optimizer(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, LowPrecisionOptimizer)


def get_optimizer_cls_and_kwargs(original: Callable, args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
    """`Trainer.get_optimizer_cls_and_kwargs`, a static method: for our names, return our optimizer and its arguments.

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


def _catch_up(trainer: Trainer, model: nn.Module | None) -> None:
    """Cast what a checkpoint or the user has added to a cast model, such as adapters. The rest is not changed.

    If `compute_loss` or `training_step` was replaced, it may need outputs in FP32. In losses around the model, every
    model is cast, so that it returns FP32; parameters of the losses stay in FP32.

    Args:
        trainer: the Trainer, about to create its optimizer or to keep one that it was given.
        model: the model that the optimizer is created for, if not `trainer.model`.
    """
    callback = callback_of(trainer)
    if callback is not None and _needs_outputs(trainer) and cast_dtypes(trainer.model):
        return_float32(trainer.model)
    model = trainer.model if model is None else model
    tree, callback = ModuleTree.of(_with_losses(trainer, model)), callback or LowPrecisionCallback()
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
    """Return the settings of an hf_lowprec optimizer passed to the constructor, by param group; empty without one."""
    optimizer, _ = arguments.get("optimizers") or (None, None)
    if isinstance(optimizer, LowPrecisionOptimizer):
        return optimizer.param_groups
    cls, kwargs = arguments.get("optimizer_cls_and_kwargs") or (None, {})
    return [kwargs] if _is_our_optimizer(cls) else []


def _with_losses(trainer: Trainer, model: nn.Module) -> nn.Module:
    """Return the losses around `model` that sentence-transformers trains (`trainer.loss`); else `model`."""
    loss = getattr(trainer, "loss", None)
    if isinstance(loss, dict) and all(isinstance(one, nn.Module) for one in loss.values()):
        loss = nn.ModuleDict(loss)
    return loss if isinstance(loss, nn.Module) and any(module is model for module in loss.modules()) else model


def _low_precision_dtypes(model: nn.Module) -> set[torch.dtype]:
    plain = (param for param in model.parameters() if not is_quantized(param))
    return {param.dtype for param in plain} & set(LOW_PRECISION_DTYPES)


def _is_ours(callback: Any) -> bool:
    """Return whether `callback`, an instance or a class as Trainer takes either, is a `LowPrecisionCallback`."""
    return isinstance(callback, LowPrecisionCallback) or callback is LowPrecisionCallback


def _needs_outputs(trainer: Trainer) -> bool:
    """Return whether the Trainer may compute its loss from outputs even if the model has returned a loss.

    The Trainers of transformers and TRL do not: they leave out the labels, or use the model's loss. Nor does a
    `training_step` that calls theirs, which returns only the loss.
    """
    code_of_step = getattr(inspect.unwrap(trainer.training_step), "__code__", None)
    calls_theirs = "training_step" in getattr(code_of_step, "co_names", ())
    methods = (trainer.compute_loss, trainer.compute_loss if calls_theirs else trainer.training_step)
    return any(str(method.__module__).partition(".")[0] not in ("transformers", "trl") for method in methods)


_EVERY_TRAINER: dict[str, Callable] = {
    # Adds the callback, prepares the accelerator, casts the model before it is moved or wrapped.
    "__init__": build,
    # Casts what has been added to the model since then, such as adapters, before the optimizer collects parameters.
    "create_optimizer": create_optimizer,
    # Returns our optimizers for our names.
    "get_optimizer_cls_and_kwargs": get_optimizer_cls_and_kwargs,
    # Converts state between optimizers of this library and torch's own, in both directions.
    private_apis.LOAD_OPTIMIZER: load.load_optimizer,
}
"""Method -> its wrapper, for every Trainer: they decide whether a Trainer is one of ours, or read its files."""

_OUR_TRAINERS: dict[str, Callable] = {
    # Turns autocast off and sets up FP32 sums of gradients.
    "create_accelerator_and_postprocess": create_accelerator,
    # Clips inside the optimizer's step, where Trainer scales gradients on several device meshes itself.
    private_apis.NORM_OVER_MESHES: norm_over_meshes,
    # Chooses a complete checkpoint to resume from, and reads its state.
    "train": resume.train,
    # Ends a run that resumes from its final checkpoint; Trainer would take one more step.
    private_apis.RUN_EPOCH: resume.run_epoch,
    # Writes the checkpoint's manifest when all ranks have written their files, before older ones are deleted.
    private_apis.SAVE_CHECKPOINT: save.save_checkpoint,
    # Saves shards of models sharded at load, whose state Trainer does not save.
    private_apis.SAVE_OPTIMIZER: save.save_optimizer,
    # Writes a model folder where Trainer writes nothing, under FSDP2 with sharded state dicts.
    "save_model": save.save_model,
    # Loads weights into the parameters that the optimizer holds.
    private_apis.LOAD_CHECKPOINT: load.load_checkpoint,
    # The same for the best checkpoint.
    private_apis.LOAD_BEST: load.load_best,
}
"""Method -> its wrapper, for Trainers with our callback."""
_WRAPPED = "_hf_lowprec_wrapped"
"""The attribute of Trainer once its methods are wrapped."""


def wrap_trainer() -> None:
    """Wrap Trainer's methods. Calling it again has no effect."""
    if hasattr(Trainer, _WRAPPED):  # other libraries may have wrapped them again
        return
    setattr(Trainer, _WRAPPED, True)
    ours = {name: _for_our_trainers(wrapper) for name, wrapper in _OUR_TRAINERS.items()}
    for name, wrapper in (_EVERY_TRAINER | ours).items():
        if hasattr(Trainer, name):  # not all versions of transformers have all
            wrap_method(Trainer, name, wrapper)


def _for_our_trainers(wrapper: Callable) -> Callable:
    def method(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if callback_of(trainer) is None:
            return original(trainer, *args, **kwargs)
        return wrapper(original, trainer, *args, **kwargs)

    return method
