"""Additions to the Trainer methods that save checkpoints and models."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils._pytree import tree_map
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import CallbackHandler

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.checkpoint_files.stored_tensors import SHARDED_STATE, SHARDED_WEIGHTS
from hf_lowprec.integrations.export.parameter_names import write_model_description, write_parameter_names
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback, callback_of
from hf_lowprec.integrations.transformers.checkpoints.manifest import begin_checkpoint, finish_checkpoint
from hf_lowprec.optim import ScheduleFreeAdamW
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.sharding import checkpointable
from hf_lowprec.reduction.collectives import gather_objects

logger = logging.getLogger(__name__)


def save_checkpoint(original: Callable, trainer: Trainer, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
    """`Trainer._save_checkpoint`: mark the checkpoint as unfinished until all ranks have written their files."""
    callback = callback_of(trainer)
    if isinstance(optimizer := unwrap_optimizer(trainer.optimizer), ScheduleFreeAdamW):
        optimizer.eval()  # the next training step calls `train()`
    folder = private_apis.checkpoint_folder(trainer, trial)
    if trainer.args.should_save:
        begin_checkpoint(folder)
        write_parameter_names(folder, trainer.model, [trainer.optimizer])
        if private_apis.saves_sharded(trainer):  # Trainer would write weights alone
            write_model_description(folder, trainer.model, trainer.processing_class)
    trainer.accelerator.wait_for_everyone()  # no rank writes before an older checkpoint there is gone
    finished = False

    def finish() -> None:
        nonlocal finished
        if not finished:
            finished = True
            _finish_on_every_rank(folder, trainer.args)

    callback.saves_checkpoint = True
    try:
        # Finish before Trainer deletes older checkpoints. Ranks that do not write its state reach the end later.
        with private_apis.calling_after_trainer_state(finish):
            original(trainer, model, trial, *args, **kwargs)
        finish()
    except Exception:  # torch's message for a full disk does not mention the disk
        free = shutil.disk_usage(trainer.args.output_dir).free // 2**20
        logger.error(
            "hf_lowprec: %s was not finished, so resuming will skip it; its disk has %d MiB left", folder, free
        )
        raise
    finally:
        callback.saves_checkpoint = False
    callback.saved_checkpoint = folder


def _finish_on_every_rank(folder: Path, args: TrainingArguments) -> None:
    """Write the manifests when all ranks have written their files. Every rank must call it, and waits for the others.

    With `save_on_each_node`, a machine must not delete its older checkpoints before the others have this one.
    """
    gather_objects(None, "saving a checkpoint")
    if args.should_save and folder.is_dir():
        finish_checkpoint(folder)
    gather_objects(None, "saving a checkpoint")


def after_callbacks(
    callback: LowPrecisionCallback, original: Callable, handler: CallbackHandler, args: TrainingArguments, *others: Any
) -> Any:
    """`CallbackHandler.on_save`: write the manifest again, since callbacks may change the files of a checkpoint."""
    control = original(handler, args, *others)
    folder, callback.saved_checkpoint = callback.saved_checkpoint, None
    if folder is not None:
        _finish_on_every_rank(folder, args)
    return control


def save_model(original: Callable, trainer: Trainer, output_dir: Any = None, *args: Any, **kwargs: Any) -> None:
    """`Trainer.save_model`: write a model folder under FSDP2 with sharded state dicts, too.

    Trainer calls it for every checkpoint, which then holds shards, but also writes nothing in other calls.
    """
    saves_checkpoint = callback_of(trainer).saves_checkpoint
    if saves_checkpoint and not trainer.args.save_only_model and is_sharded_at_load(trainer.model):
        weights = tree_map(checkpointable, get_model_state_dict(trainer.model))
        state_dict_saver.save({"model": weights}, checkpoint_id=Path(output_dir, SHARDED_WEIGHTS))
        return
    with nullcontext() if saves_checkpoint else private_apis.saving_whole_models(trainer):
        original(trainer, output_dir, *args, **kwargs)


def save_optimizer(original: Callable, trainer: Trainer, output_dir: str, *args: Any, **kwargs: Any) -> None:
    """Save optimizer and scheduler, by Trainer's own method; for a model sharded at load, save shards of the states."""
    if not is_sharded_at_load(trainer.model):
        original(trainer, output_dir, *args, **kwargs)
        return
    states = get_optimizer_state_dict(trainer.model, unwrap_optimizer(trainer.optimizer))
    sharded = {"optimizer": tree_map(checkpointable, states)}
    state_dict_saver.save(sharded, checkpoint_id=Path(output_dir, SHARDED_STATE))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
