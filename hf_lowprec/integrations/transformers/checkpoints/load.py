"""Additions to the Trainer methods that load weights and the optimizer's state from a checkpoint.

Weights are loaded into the parameters that the optimizer holds, and their low bits are kept. States are converted
between this library's optimizers and others, and between rounding modes. If transformers has sharded the model over a
device mesh while loading it (`DistributedConfig`), Trainer does not save its state, so weights and states go through
torch.distributed.checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, read_optimizer
from hf_lowprec.integrations.checkpoint_files.stored_tensors import SHARDED_STATE, SHARDED_WEIGHTS, explain_unreadable
from hf_lowprec.integrations.transformers.callback import callback_of
from hf_lowprec.integrations.transformers.checkpoints.resume import unsafe_shards
from hf_lowprec.optim import LowPrecisionOptimizer, ScheduleFreeAdamW
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.sharding import checkpointable, is_sharded
from hf_lowprec.optim.state.fp32_weights import keep_low_bits, low_bits_state, store_sums
from hf_lowprec.optim.state.saved_formats import START_AGAIN
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off, note_loading

logger = logging.getLogger(__name__)

_OPTIONS_OF_STATES = {"rounding", "state_dtype", "state_rounding"}
"""Keys of param groups that decide which states exist; 8-bit states do not allow every `state_rounding`."""


def load_checkpoint(
    original: Callable, trainer: Trainer, resume_from_checkpoint: str, *args: Any, **kwargs: Any
) -> None:
    """Let Trainer load weights into the existing parameters, which the optimizer and FP32 estimates refer to.

    If they are FP32, as in another optimizer's checkpoint, their low bits are kept for the compensation.
    """
    keeps_low_bits, checkpoint = callback_of(trainer).keep_low_bits, Path(resume_from_checkpoint)
    with explain_unreadable(checkpoint, (CheckpointException,)):
        if is_sharded_at_load(trainer.model):
            _load_sharded_weights(trainer.model, checkpoint)
            return
        with load_in_place(trainer.model, keeps_low_bits):
            original(trainer, resume_from_checkpoint, *args, **kwargs)
    if keeps_low_bits and (count := keep_low_bits_of_checkpoint(trainer.model, checkpoint)):
        logger.info("hf_lowprec: kept the low bits of %d FP32 weights of the checkpoint", count)


def load_best(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Let Trainer load the best weights at the end of a run, and load their low bits."""
    best, optimizer = Path(trainer.state.best_model_checkpoint), unwrap_optimizer(trainer.optimizer)
    if unsafe := unsafe_shards(best):  # `trainer_state.json` of another run may name any folder
        raise ValueError(f"{str(best)!r}, the best checkpoint, is not loaded: {', '.join(unsafe)}")
    callback_of(trainer).weights_match_optimizer = False
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.eval()
    with load_in_place(trainer.model), explain_unreadable(best, (CheckpointException,)):
        if is_sharded_at_load(trainer.model):
            _load_sharded_weights(trainer.model, best)
        else:
            original(trainer, *args, **kwargs)
    if isinstance(optimizer, LowPrecisionOptimizer) and (best / OPTIMIZER_NAME).exists():
        load_low_bits_of_optimizer(optimizer, best / OPTIMIZER_NAME)


def _load_sharded_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into the sharded parameters of `model`. Every rank must call it."""
    weights = tree_map(checkpointable, get_model_state_dict(model))
    state_dict_loader.load({"model": weights}, checkpoint_id=checkpoint / SHARDED_WEIGHTS)


@contextmanager
def load_in_place(model: nn.Module, keeping_low_bits: bool = False) -> Iterator[None]:
    """If parameters of `model` are replaced inside, copy the new values into the old ones, and put the old ones back.

    PEFT's `load_adapter` replaces 16-bit adapters with new FP32 parameters. An optimizer that was built earlier would
    continue with the old ones, which no longer belong to the model. A new parameter of a different shape is kept.

    Args:
        model: the model.
        keeping_low_bits: keep what copying FP32 values to 16-bit parameters rounds off, for the optimizer.
    """
    before = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    for module in model.modules():
        note_loading(module)
    yield
    for owner, name, param in before:
        loaded = owner._parameters.get(name)
        if loaded is not None and loaded is not param and loaded.shape == param.shape:
            with torch.no_grad():
                param.copy_(loaded)
            if keeping_low_bits and param.dtype in LOW_PRECISION_DTYPES and loaded.dtype == torch.float32:
                attach_rounded_off(param, loaded.detach())
            owner._parameters[name] = param


@torch.no_grad()
def keep_low_bits_of_checkpoint(model: nn.Module, checkpoint: Path) -> int:
    """Keep the low bits of the 16-bit parameters of `model` that were loaded from FP32 tensors of `checkpoint`.

    Tensors are read one by one. Sharded parameters are left out: their low bits start at zero.

    Args:
        model: the model, with the weights of the checkpoint.
        checkpoint: a folder with `model*.safetensors`.

    Returns:
        The number of parameters that have low bits.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    count = 0
    for path in sorted(checkpoint.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys() & params.keys():
                param = params[name]
                if param.dtype not in LOW_PRECISION_DTYPES or is_sharded(param):
                    continue
                if file.get_slice(name).get_dtype() != "F32":
                    continue
                exact = file.get_tensor(name).to(param.device)
                if exact.shape == param.shape and torch.equal(exact.to(param.dtype), param):
                    count += attach_rounded_off(param, exact)
    return count


@torch.no_grad()
def load_low_bits_of_optimizer(optimizer: LowPrecisionOptimizer, path: Path) -> None:
    """Give the compensations and remainders of `optimizer` their values in a checkpoint whose weights were loaded.

    The values are then kept with the parameters, as when training ends. Values of another rounding mode are converted,
    and missing ones become zero. If the file cannot be read, nothing changes.

    Args:
        optimizer: the optimizer that saved the checkpoint.
        path: the file of its state dict.
    """
    try:
        saved = read_optimizer(path)
    except Exception as error:  # training is over, and the weights are loaded
        logger.info("hf_lowprec: no compensations or remainders can be read from %s: %r", path, error)
        return
    groups = [group["params"] for group in optimizer.param_groups]
    if [*map(len, groups)] != [len(group["params"]) for group in saved.param_groups]:
        return
    for param, other in zip(chain(*groups), saved.parameters, strict=True):
        own = low_bits_state(optimizer.state.get(param, {}))
        if own is None:
            continue
        value = other.read(other.compensation).to(own.device) if other.compensation else torch.zeros_like(own)
        if value.dtype == own.dtype:
            own.copy_(value)
        else:
            store_sums(param, own, value)
    keep_low_bits(optimizer)


def load_optimizer(original: Callable, trainer: Trainer, checkpoint: str | None, *args: Any, **kwargs: Any) -> None:
    """Load optimizer and scheduler when resuming, by Trainer's own method.

    An optimizer of this library converts other optimizers' state by itself. Other optimizers would ignore the
    compensations or remainders of this library.

    Raises:
        ValueError: the state cannot be converted.
    """

    def load() -> None:
        original(trainer, checkpoint, *args, **kwargs)

    optimizer = unwrap_optimizer(trainer.optimizer)
    if checkpoint is None or not isinstance(optimizer, torch.optim.Optimizer):
        load()
        return
    with explain_unreadable(Path(checkpoint), (CheckpointException,)):
        if isinstance(optimizer, LowPrecisionOptimizer):
            _load_into_ours(load, trainer, optimizer, Path(checkpoint))
        else:
            _load_into_others(load, trainer, optimizer, Path(checkpoint))


def _load_into_ours(
    load: Callable[[], None], trainer: Trainer, optimizer: LowPrecisionOptimizer, checkpoint: Path
) -> None:
    callback = callback_of(trainer)
    scheduled = callback is not None and callback.rounding_schedule is not None
    sharded_at_load = is_sharded_at_load(trainer.model)
    sharded = trainer.is_fsdp_enabled or sharded_at_load
    if not sharded and not scheduled:
        load()
        return
    saved_by_fsdp = _saved_by_fsdp(checkpoint) if sharded else None
    if saved_by_fsdp is not None and not saved_by_fsdp.is_ours:
        raise ValueError(
            f"{str(checkpoint)!r} was saved under FSDP by another optimizer, and distributed checkpoints are not "
            f"converted for {type(optimizer).__name__}: resume with the optim= that saved it, or {START_AGAIN}"
        )
    own = [group["rounding"] for group in optimizer.param_groups]
    with _as_saved(optimizer, saved_by_fsdp.param_groups if saved_by_fsdp else []):
        if not sharded_at_load:
            load()
        elif saved_by_fsdp is not None:
            _load_sharded_state(trainer, checkpoint)
    if scheduled:
        return  # the schedule sets the mode at the beginning of the next step
    saved = [group["rounding"] for group in optimizer.param_groups]
    for group, mode in zip(optimizer.param_groups, own, strict=True):
        group["rounding"] = mode
    if saved != own:
        logger.warning(
            "hf_lowprec: the rounding mode changes from %s to %s: before the next step, compensations and remainders "
            "are converted, or rounded into the weights for modes that have neither",
            sorted(set(saved)),
            sorted(set(own)),
        )


def _load_sharded_state(trainer: Trainer, folder: Path) -> None:
    """Load the states of optimizer and scheduler from a checkpoint. Every rank must call it."""
    optimizer = unwrap_optimizer(trainer.optimizer)
    states = get_optimizer_state_dict(trainer.model, optimizer)
    loaded = {"optimizer": tree_map(checkpointable, states)}
    state_dict_loader.load(loaded, checkpoint_id=folder / SHARDED_STATE)
    # Tensors were loaded in place, everything else into the dictionaries.
    read = tree_map(lambda own, other: own if isinstance(own, Tensor) else other, states, loaded["optimizer"])
    set_optimizer_state_dict(trainer.model, optimizer, read)
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


@contextmanager
def _as_saved(optimizer: LowPrecisionOptimizer, saved_groups: list[ParamGroup]) -> Iterator[None]:
    """Give the optimizer the options of `saved_groups` until its `load_state_dict`, and leave it in the state's mode.

    A distributed checkpoint is loaded into the states that the optimizer has, so these must exist as they were saved.
    `load_state_dict` then converts them to the optimizer's own `state_dtype`.
    """
    own = [{key: group[key] for key in _OPTIONS_OF_STATES} for group in optimizer.param_groups]
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=False):
        group.update({key: saved[key] for key in _OPTIONS_OF_STATES & saved.keys()})

    def give_back(_: object, loading: dict[str, Any]) -> None:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)
        for group, saved in zip(optimizer.param_groups, loading["param_groups"], strict=False):
            group["rounding"] = saved.get("rounding", group["rounding"])

    handle = optimizer.register_load_state_dict_pre_hook(give_back)
    try:
        yield
    except BaseException:
        give_back(optimizer, {"param_groups": []})
        raise
    finally:
        handle.remove()


def _load_into_others(
    load: Callable[[], None], trainer: Trainer, optimizer: torch.optim.Optimizer, checkpoint: Path
) -> None:
    def refuse(is_ours: bool) -> None:
        if is_ours:
            raise ValueError(
                f"{str(checkpoint)!r} was saved by an optimizer of hf_lowprec, whose state is not converted for "
                f"{type(optimizer).__name__}: resume with the optim= that saved it, or export the FP32 weights "
                f"(`hf-lowprec export {checkpoint} FOLDER`) and train them without resume_from_checkpoint"
            )

    saved_by_fsdp = _saved_by_fsdp(checkpoint) if trainer.is_fsdp_enabled else None
    refuse(saved_by_fsdp is not None and saved_by_fsdp.is_ours)
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: refuse(any("rounding" in group for group in state_dict["param_groups"]))
    )
    try:
        load()
    finally:
        handle.remove()


def _saved_by_fsdp(checkpoint: Path) -> StoredOptimizer | None:
    """Return the state that FSDP will load; None if there is none."""
    paths = (checkpoint / "optimizer.bin", checkpoint / SHARDED_STATE)
    return next((read_optimizer(path) for path in paths if path.exists()), None)
