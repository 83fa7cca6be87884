"""Checkpoints of models that transformers has sharded over a device mesh while loading them (`DistributedConfig`).

Trainer saves no optimizer state of these. Here it goes through torch.distributed.checkpoint, as do the weights: each
rank writes its shards into the folders that FSDP2 writes with sharded state dicts.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.transformers.trainer_call import TrainerCall
from hf_lowprec.optim.sharding import checkpointable
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer

_MODEL, _OPTIMIZER = f"{FSDP_MODEL_NAME}_0", "optimizer_0"
_described = functools.partial(tree_map, checkpointable)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Save the weights of `model` to the checkpoint `folder`. Every rank must call it."""
    state_dict_saver.save({"model": _described(get_model_state_dict(model))}, checkpoint_id=folder / _MODEL)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint into the parameters of `model`. Every rank must call it."""
    state_dict_loader.load({"model": _described(get_model_state_dict(model))}, checkpoint_id=folder / _MODEL)


def save_optimizer(call: TrainerCall) -> None:
    """Trainer's method that saves optimizer and scheduler: save shards of the states."""
    trainer = call.trainer
    if not is_sharded_at_load(trainer.model):
        call.proceed()
        return
    folder = Path(call.arguments["output_dir"])
    states = get_optimizer_state_dict(trainer.model, unwrap_optimizer(trainer.optimizer))
    state_dict_saver.save({"optimizer": _described(states)}, checkpoint_id=folder / _OPTIMIZER)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(trainer: Trainer, folder: Path) -> None:
    """Load the states of optimizer and scheduler from a checkpoint. Every rank must call it."""
    optimizer = unwrap_optimizer(trainer.optimizer)
    states = get_optimizer_state_dict(trainer.model, optimizer)
    loaded = {"optimizer": _described(states)}
    state_dict_loader.load(loaded, checkpoint_id=folder / _OPTIMIZER)
    # Tensors were loaded in place, everything else into the dictionaries.
    read = tree_map(lambda own, other: own if isinstance(own, Tensor) else other, states, loaded["optimizer"])
    set_optimizer_state_dict(trainer.model, optimizer, read)
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
