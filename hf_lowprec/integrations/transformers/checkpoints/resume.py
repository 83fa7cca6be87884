"""Decides which checkpoint a run resumes from: the newest whose manifest matches its files, or the one the user names.

The time in the manifest says which one is newest: copying changes the times of files, and a run that starts again in
the same folder, or from an earlier step, leaves checkpoints of higher steps. All ranks reach the same decision: one
process per machine checks the files that it sees, and all checks count.

The Trainer's state is read here, too, even if another version of transformers wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, read_json
from hf_lowprec.integrations.checkpoint_files.stored_tensors import SHARDED_WEIGHTS, ZERO_STATES, ShardedFolder
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.callback import callback_of
from hf_lowprec.integrations.transformers.checkpoints.manifest import (
    MANIFEST_NAME,
    Examined,
    check_files,
    examine,
    listing,
)
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.reduction.collectives import gather_objects

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_OPTIMIZER = ("optimizer.pt", "optimizer*.bin", "optimizer_[0-9]*", ZERO_STATES)

_on_every_rank = functools.partial(gather_objects, purpose="choosing a checkpoint")


def train(original: Callable, trainer: Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.train`: choose a complete checkpoint to resume from.

    If training raises an exception, end the run as far as the callback can.

    Raises:
        ValueError: see `choose_checkpoint`; or the checkpoint holds the model in another layout than this run's.
    """
    checkpoint = choose_checkpoint(resume_from_checkpoint, trainer.args.output_dir)
    if isinstance(checkpoint, str) and Path(checkpoint).is_dir():
        engine = "DeepSpeed" if trainer.is_deepspeed_enabled else None
        _check_layout(Path(checkpoint), engine or private_apis.state_dict_type(trainer))
    try:
        with private_apis.trainer_states_read_by(read_trainer_state) if checkpoint else nullcontext():
            return original(trainer, checkpoint, *args, **kwargs)
    except BaseException:
        try:
            callback_of(trainer).end_by_error(trainer.args, unwrap_optimizer(trainer.optimizer))
        except Exception as error:  # for example, after an error on a device, where nothing works any longer
            logger.info("hf_lowprec: the low bits of the weights could not be kept: %r", error)
        raise


def run_epoch(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Run Trainer's loop over an epoch, but skip it if all steps are done.

    Trainer checks `max_steps` only after a step, so a run resumed from its final checkpoint would take one too many.
    """
    if trainer.state.global_step >= trainer.state.max_steps:
        trainer.control.should_training_stop = True
        return
    original(trainer, *args, **kwargs)


def choose_checkpoint(
    resume_from_checkpoint: str | os.PathLike[str] | bool | None, output_dir: str
) -> str | bool | None:
    """Return what Trainer should resume from, the same on all ranks. Every rank must call it.

    Args:
        resume_from_checkpoint: as `Trainer.train` takes it. `True` stands for the newest complete checkpoint in
            `output_dir`; later ones are skipped, and named in a warning.
        output_dir: where the run saves its checkpoints.

    Returns:
        A path, as a string; or True, False, None or a path where there is nothing: Trainer then starts from scratch or
        raises its own error.

    Raises:
        ValueError: the named checkpoint is incomplete, or all checkpoints are; the ranks name different checkpoints, or
            some cannot see the checkpoint; or its shards hold anything but data.
    """
    if isinstance(resume_from_checkpoint, os.PathLike):
        resume_from_checkpoint = os.fspath(resume_from_checkpoint)
    asked = _on_every_rank(resume_from_checkpoint if resume_from_checkpoint else None)
    if any(other != asked[0] for other in asked):
        raise ValueError(f"resume_from_checkpoint differs between ranks: {asked}; pass the same value on all ranks")
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    folder, named = Path(output_dir), None if resume_from_checkpoint is True else Path(resume_from_checkpoint)
    candidates = [named] if named is not None else _checkpoints_in(folder)
    examined = {path.name: _examine(path) for path in candidates if path.is_dir()} if _checks_here() else {}
    found = _on_every_rank(examined)
    chosen = named or _newest(folder, found)
    if chosen is None or not any(found):
        return resume_from_checkpoint  # Trainer raises an error
    check_files(chosen, "resume_from_checkpoint", _problems(chosen.name, found))
    unsafe_here = unsafe_shards(chosen) if _checks_here() else []
    seen, unsafe = zip(*_on_every_rank((chosen.is_dir(), unsafe_here)), strict=True)
    if missing_on := [rank for rank, sees in enumerate(seen) if not sees]:
        raise ValueError(
            f"rank {', '.join(map(str, missing_on))} cannot see {str(chosen)!r}, from which the others resume; "
            "put output_dir on storage shared by all machines, or save with save_on_each_node=True"
        )
    if problems := _of_all_ranks(unsafe):
        raise ValueError(f"{str(chosen)!r} is not loaded: {listing(problems)}. Pass another checkpoint")
    _warn_of_incomplete_state(chosen)
    return str(chosen)


def _check_layout(checkpoint: Path, wanted: str | None) -> None:
    """Raise ValueError unless the checkpoint has the layout of this run's checkpoints.

    Args:
        checkpoint: the folder.
        wanted: FSDP's state dict type, or "DeepSpeed"; None without either.
    """
    layouts = {
        "DeepSpeed": _holds(checkpoint, "global_step*"),
        "SHARDED_STATE_DICT": (checkpoint / SHARDED_WEIGHTS).is_dir(),
        "FULL_STATE_DICT": (checkpoint / f"{FSDP_MODEL_NAME}.bin").exists(),
    }
    found = next((layout for layout, is_there in layouts.items() if is_there), None)
    if found == wanted:
        return
    without_fsdp = {None: "without FSDP or DeepSpeed", "DeepSpeed": "under DeepSpeed"}
    saved, trains = (without_fsdp.get(layout, f"under FSDP with {layout}") for layout in (found, wanted))
    if without_fsdp.keys() & {found, wanted}:
        way_out = (
            "Resume it that way, or begin a new run with its weights: hf-lowprec export CHECKPOINT FOLDER writes them, "
            "with compensations and remainders, and from_pretrained(FOLDER) loads them"
        )
    else:
        way_out = f"Set state_dict_type={found!r} in fsdp_config (fsdp_state_dict_type in accelerate's configuration)"
    raise ValueError(
        f"resume_from_checkpoint={str(checkpoint)!r} was saved {saved}"
        f"{'' if found else ', or with save_only_model=True'}, but this run trains {trains}. {way_out}"
    )


def read_trainer_state(path: Path, cls: type[TrainerState] = TrainerState) -> TrainerState:
    """Read a Trainer's state as a `cls`, ignoring fields that this version of transformers does not have.

    Raises:
        ValueError: the file cannot be read; the message names it.
    """
    fields = read_json(path)
    unknown = _unknown_fields(fields, cls)
    return cls(**{name: value for name, value in fields.items() if name not in unknown})


def holds_optimizer(checkpoint: Path) -> bool:
    """Return whether the checkpoint has an optimizer's state; `save_only_model=True` writes none."""
    return _holds(checkpoint, *_OPTIMIZER)


def _holds(checkpoint: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in checkpoint.glob(pattern))


def _examine(checkpoint: Path) -> Examined:
    """Examine a checkpoint; without a manifest, it must have the file that Trainer writes last."""
    if (checkpoint / MANIFEST_NAME).is_file() or (checkpoint / TRAINER_STATE_NAME).is_file():
        return examine(checkpoint)
    return Examined(0, [f"{TRAINER_STATE_NAME} is missing"])


def _checkpoints_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _CHECKPOINT.match(path.name)] if folder.is_dir() else []


def _newest(folder: Path, found: list[dict[str, Examined]]) -> Path | None:
    """Return the newest complete checkpoint, and warn about those that were skipped; None if there are none.

    Checkpoints without a manifest, which a stock Trainer has saved, come last, by their steps.

    Args:
        folder: the folder that they are in.
        found: what each rank has found there.

    Raises:
        ValueError: there are checkpoints, and none is complete.
    """
    saved = {name: examined.saved for name, examined in found[0].items()}
    problems = {name: _problems(name, found) for name in saved}
    newest_first = sorted(saved, key=lambda name: (saved[name], _step(name)), reverse=True)
    chosen = next((name for name in newest_first if not problems[name]), None)
    skipped = newest_first
    if chosen is not None:
        later = newest_first[: newest_first.index(chosen)]
        skipped = later + [name for name in newest_first if name not in later and _step(name) > _step(chosen)]
    reasons = ", ".join(
        f"{name} ({listing(problems[name]) or ('saved earlier' if saved[name] else f'no {MANIFEST_NAME}')})"
        for name in skipped
    )
    if chosen is None and skipped:
        raise ValueError(
            f"no checkpoint in {str(folder)!r} is complete: {reasons}; start again without resume_from_checkpoint, "
            "or pass the path of another checkpoint"
        )
    if skipped:
        _warn(f"resuming from {folder / str(chosen)}; skipped: {reasons}")
    return None if chosen is None else folder / chosen


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _problems(name: str, found: list[dict[str, Examined]]) -> list[str]:
    return _of_all_ranks([of_rank[name].problems if name in of_rank else [] for of_rank in found])


def _of_all_ranks(problems: Sequence[list[str]]) -> list[str]:
    """List the problems that the ranks have found in a checkpoint, in rank order."""
    return [
        problem if rank == 0 else f"{problem} (as rank {rank} sees it)"
        for rank, of_rank in enumerate(problems)
        for problem in of_rank
    ]


def unsafe_shards(checkpoint: Path) -> list[str]:
    """Return why torch's own reader, which unpickles all but tensors, must not read a sharded checkpoint."""
    problems = []
    for path in sorted(checkpoint.rglob(".metadata")):
        try:
            ShardedFolder(path.parent).check_objects()
        except InputError as error:
            problems.append(str(error))
    return problems


def _warn_of_incomplete_state(checkpoint: Path) -> None:
    """Warn about what is not restored: optimizer and random states, and fields that this Trainer does not know."""
    if not holds_optimizer(checkpoint):
        _warn(
            f"{checkpoint} contains no optimizer state (save_only_model=True does not save it): training continues "
            "with fresh moments and without compensation, and the learning rate schedule starts over"
        )
    elif not _holds(checkpoint, "rng_state*.pth"):
        _warn(
            f"{checkpoint} contains no random states: dropout and the order of batches will differ from the original "
            "run"
        )
    if unknown := _unknown_fields(read_json(checkpoint / TRAINER_STATE_NAME)):
        _warn(
            f"{TRAINER_STATE_NAME} of {checkpoint} was written by another version of transformers; ignored fields: "
            + ", ".join(unknown)
        )


def _unknown_fields(state: dict[str, Any], cls: type[TrainerState] = TrainerState) -> list[str]:
    """Return the fields of a saved state that `cls` of this version of transformers does not have."""
    return sorted(state.keys() - {field.name for field in dataclasses.fields(cls)})


def _checks_here() -> bool:
    """Return whether this process checks files; one process per machine does."""
    return not _several_ranks() or PartialState().is_local_main_process


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _warn(message: str) -> None:
    if not _several_ranks() or dist.get_rank() == 0:
        logger.warning("%s", message)
