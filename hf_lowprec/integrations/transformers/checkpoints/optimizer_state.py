"""Trainer loads an optimizer's state: conversions between this library's optimizers and others, and between modes.

Trainer saves no state if transformers has sharded the model over a device mesh while loading it (`DistributedConfig`).
Here it goes through torch.distributed.checkpoint, as do the weights: each rank writes its shards into the folder that
FSDP2 writes with sharded state dicts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._pytree import tree_map
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredOptimizer, read_optimizer
from hf_lowprec.integrations.checkpoint_files.stored_tensors import explain_unreadable
from hf_lowprec.integrations.transformers.trainer_call import TrainerCall, attachment_of
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.sharding import checkpointable
from hf_lowprec.optim.state.imported_states import START_AGAIN
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer

logger = logging.getLogger(__name__)

_SHARDED_STATE = "optimizer_0"
_OPTIONS_OF_STATES = {"rounding", "state_dtype", "state_rounding"}
"""Keys of param groups that decide which states exist; states in 8 bits exclude a value of `state_rounding`."""


def save_optimizer(call: TrainerCall) -> None:
    """Trainer's method that saves optimizer and scheduler: save shards of the states."""
    trainer = call.trainer
    if not is_sharded_at_load(trainer.model):
        call.proceed()
        return
    folder = Path(call.arguments["output_dir"])
    states = get_optimizer_state_dict(trainer.model, unwrap_optimizer(trainer.optimizer))
    state_dict_saver.save({"optimizer": tree_map(checkpointable, states)}, checkpoint_id=folder / _SHARDED_STATE)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(call: TrainerCall) -> None:
    """Trainer's method that loads optimizer and scheduler when resuming.

    An optimizer of this library converts other optimizers' state by itself. Others would ignore the compensations or
    remainders of this library's.

    Raises:
        ValueError: the state cannot be converted.
    """
    checkpoint = call.arguments.get("checkpoint")
    optimizer = unwrap_optimizer(call.trainer.optimizer)
    if checkpoint is None or not isinstance(optimizer, torch.optim.Optimizer):
        call.proceed()
        return
    with explain_unreadable(Path(checkpoint), (CheckpointException,)):
        if isinstance(optimizer, LowPrecisionOptimizer):
            _load_into_ours(call, optimizer, Path(checkpoint))
        else:
            _load_into_others(call, optimizer, Path(checkpoint))


def _load_into_ours(call: TrainerCall, optimizer: LowPrecisionOptimizer, checkpoint: Path) -> None:
    attachment = attachment_of(call.trainer)
    scheduled = attachment is not None and attachment.callback.rounding_schedule is not None
    sharded_at_load = is_sharded_at_load(call.trainer.model)
    sharded = call.trainer.is_fsdp_enabled or sharded_at_load
    if not sharded and not scheduled:
        call.proceed()
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
            call.proceed()
        elif saved_by_fsdp is not None:
            _load_sharded_state(call.trainer, checkpoint)
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
    state_dict_loader.load(loaded, checkpoint_id=folder / _SHARDED_STATE)
    # Tensors were loaded in place, everything else into the dictionaries.
    read = tree_map(lambda own, other: own if isinstance(own, Tensor) else other, states, loaded["optimizer"])
    set_optimizer_state_dict(trainer.model, optimizer, read)
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


@contextmanager
def _as_saved(optimizer: LowPrecisionOptimizer, saved_groups: list[ParamGroup]) -> Iterator[None]:
    """Give the optimizer the options of `saved_groups` until its `load_state_dict`, and leave the mode of the state.

    A distributed checkpoint is loaded into the states that the optimizer has, so these must be as they were saved.
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


def _load_into_others(call: TrainerCall, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    def refuse(is_ours: bool) -> None:
        if is_ours:
            raise ValueError(
                f"{str(checkpoint)!r} was saved by an optimizer of hf_lowprec, whose state is not converted for "
                f"{type(optimizer).__name__}: resume with the optim= that saved it, or export the FP32 weights "
                f"(`hf-lowprec export {checkpoint} FOLDER`) and train them without resume_from_checkpoint"
            )

    saved_by_fsdp = _saved_by_fsdp(checkpoint) if call.trainer.is_fsdp_enabled else None
    refuse(saved_by_fsdp is not None and saved_by_fsdp.is_ours)
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: refuse(any("rounding" in group for group in state_dict["param_groups"]))
    )
    try:
        call.proceed()
    finally:
        handle.remove()


def _saved_by_fsdp(checkpoint: Path) -> StoredOptimizer | None:
    """The state that FSDP will load; None if there is none."""
    paths = (checkpoint / "optimizer.bin", checkpoint / _SHARDED_STATE)
    return next((read_optimizer(path) for path in paths if path.exists()), None)
