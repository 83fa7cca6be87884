"""Additions to the Trainer methods that save checkpoints, load them and resume from them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_callback import CallbackHandler

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.integrations.checkpoint_files.stored_tensors import explain_unreadable
from hf_lowprec.integrations.export.parameter_names import write_model_description, write_parameter_names
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.checkpoints.manifest import begin_checkpoint, finish_checkpoint
from hf_lowprec.integrations.transformers.checkpoints.resume import (
    check_layout,
    choose_checkpoint,
    read_trainer_state,
    unsafe_shards,
)
from hf_lowprec.integrations.transformers.checkpoints.weights import (
    keep_low_bits_of_checkpoint,
    load_in_place,
    load_low_bits_of_optimizer,
    load_sharded_weights,
    save_sharded_weights,
)
from hf_lowprec.integrations.transformers.trainer_call import Attachment, TrainerCall
from hf_lowprec.optim import LowPrecisionOptimizer, ScheduleFreeAdamW
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.reduction.collectives import gather_objects

logger = logging.getLogger(__name__)


def train(call: TrainerCall) -> Any:
    """`Trainer.train`: choose a whole checkpoint to resume from.

    If training raises an exception, end the run as far as the callback can.

    Raises:
        ValueError: see `choose_checkpoint`; or the checkpoint holds the model in another way than those of this run.
    """
    checkpoint = choose_checkpoint(call.arguments.get("resume_from_checkpoint"), call.trainer.args.output_dir)
    if isinstance(checkpoint, str) and Path(checkpoint).is_dir():
        engine = "DeepSpeed" if call.trainer.is_deepspeed_enabled else None
        check_layout(Path(checkpoint), engine or private_apis.state_dict_type(call.trainer))
    call.arguments["resume_from_checkpoint"] = checkpoint
    with (
        private_apis.trainer_states_read_by(read_trainer_state) if checkpoint else nullcontext(),
        _ending_by_error(call),
    ):
        return call.proceed()


@contextmanager
def _ending_by_error(call: TrainerCall) -> Iterator[None]:
    """Call the callback's `end_by_error` after an exception inside, which it never replaces by one of its own."""
    try:
        yield
    except BaseException:
        try:
            call.attachment.callback.end_by_error(call.trainer.args, unwrap_optimizer(call.trainer.optimizer))
        except Exception as error:  # of a device, say, on which nothing works any more
            logger.info("hf_lowprec: the low bits of the weights could not be kept: %r", error)
        raise


def run_epoch(call: TrainerCall) -> None:
    """Trainer's loop over an epoch: skip it if all steps are done.

    Trainer checks `max_steps` only after a step, so a run resumed from its final checkpoint would take one too many.
    """
    trainer = call.trainer
    if trainer.state.global_step >= trainer.state.max_steps:
        trainer.control.should_training_stop = True
        return
    call.proceed()


def save_checkpoint(call: TrainerCall) -> None:
    """`Trainer._save_checkpoint`: mark the checkpoint as unfinished until all ranks have written their files."""
    trainer, attachment = call.trainer, call.attachment
    if isinstance(optimizer := unwrap_optimizer(trainer.optimizer), ScheduleFreeAdamW):
        optimizer.eval()  # the next training step calls `train()`
    folder = private_apis.checkpoint_folder(trainer, call.arguments["trial"])
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

    attachment.saves_checkpoint = True
    try:
        # Before Trainer deletes older checkpoints. Ranks that do not write its state come there afterwards.
        with private_apis.calling_after_trainer_state(finish):
            call.proceed()
        finish()
    except Exception:  # torch's message for a full disk does not mention the disk
        free = shutil.disk_usage(trainer.args.output_dir).free // 2**20
        logger.error(
            "hf_lowprec: %s was not finished, so resuming will skip it; its disk has %d MiB left", folder, free
        )
        raise
    finally:
        attachment.saves_checkpoint = False
    attachment.saved = folder


def _finish_on_every_rank(folder: Path, args: TrainingArguments) -> None:
    """Write the manifests when all ranks have written their files. Every rank must call it, and returns when all have.

    With `save_on_each_node`, a machine must not delete its older checkpoints before the others have this one.
    """
    gather_objects(None, "saving a checkpoint")
    if args.should_save and folder.is_dir():
        finish_checkpoint(folder)
    gather_objects(None, "saving a checkpoint")


def save_model(call: TrainerCall) -> None:
    """`Trainer.save_model`: write a model folder under FSDP2 with sharded state dicts, too.

    Trainer calls it for every checkpoint, which then holds shards, and writes nothing for any other call either.
    """
    resumable = call.attachment.saves_checkpoint and not call.trainer.args.save_only_model
    if resumable and is_sharded_at_load(call.trainer.model):
        save_sharded_weights(call.trainer.model, Path(call.arguments["output_dir"]))
        return
    whole = nullcontext() if call.attachment.saves_checkpoint else private_apis.saving_whole_models(call.trainer)
    with whole:
        call.proceed()


def after_callbacks(
    attachment: Attachment, original: Callable, handler: CallbackHandler, args: TrainingArguments, *others: Any
) -> Any:
    """`CallbackHandler.on_save`: write the manifest again, since callbacks may change the files of a checkpoint."""
    control = original(handler, args, *others)
    folder, attachment.saved = attachment.saved, None
    if folder is not None:
        _finish_on_every_rank(folder, args)
    return control


def load_checkpoint(call: TrainerCall) -> None:
    """Let Trainer load weights into the existing parameters, which the optimizer and FP32 estimates refer to.

    If they are FP32 weights, as of a checkpoint of another optimizer, their low bits are kept for the compensation.
    """
    callback, checkpoint = call.attachment.callback, Path(call.arguments["resume_from_checkpoint"])
    if is_sharded_at_load(call.trainer.model):
        with explain_unreadable(checkpoint, (CheckpointException,)):
            load_sharded_weights(call.trainer.model, checkpoint)
        return
    with (
        load_in_place(call.trainer.model, callback.keep_low_bits),
        explain_unreadable(checkpoint, (CheckpointException,)),
    ):
        call.proceed()
    if callback.keep_low_bits:
        count = keep_low_bits_of_checkpoint(call.trainer.model, checkpoint)
        if count:
            logger.info("hf_lowprec: kept the low bits of %d FP32 weights of the checkpoint", count)


def load_best(call: TrainerCall) -> None:
    """Let Trainer load the best weights at the end of a run, and load their low bits."""
    best, optimizer = Path(call.trainer.state.best_model_checkpoint), unwrap_optimizer(call.trainer.optimizer)
    if unsafe := unsafe_shards(best):  # `trainer_state.json` of another run may name any folder
        raise ValueError(f"{str(best)!r}, the best checkpoint, is not loaded: {', '.join(unsafe)}")
    call.attachment.callback.weights_match_optimizer = False
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.eval()
    with load_in_place(call.trainer.model), explain_unreadable(best, (CheckpointException,)):
        if is_sharded_at_load(call.trainer.model):
            load_sharded_weights(call.trainer.model, best)
        else:
            call.proceed()
    if isinstance(optimizer, LowPrecisionOptimizer) and (best / OPTIMIZER_NAME).exists():
        load_low_bits_of_optimizer(optimizer, best / OPTIMIZER_NAME)
