"""Which checkpoint to resume from, when the last one may have been cut short.

Trainer writes `trainer_state.json` last, so a folder in which it is missing or unreadable was not finished; nor was one
of this run's own folder in which it is older than the optimizer's file: a second run was writing over a first one's.
Sharded states are a folder each, whose `.metadata` is written when every process has written its part.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

TRAINER_STATE_NAME = "trainer_state.json"
_SHARDED = (f"{OPTIMIZER_NAME}_[0-9]*", f"{FSDP_MODEL_NAME}_[0-9]*")
_OPTIMIZER_FILES = ("optimizer.pt", f"{OPTIMIZER_NAME}.bin", f"{OPTIMIZER_NAME}_0/.metadata")
_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


def is_complete(checkpoint: Path) -> bool:
    """Whether Trainer finished writing `checkpoint`."""
    try:
        TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, TypeError):
        return False
    return True


def last_complete(output_dir: Path) -> Path | None:
    """The finished checkpoint of the highest step in `output_dir`, or None."""
    return next((path for _, path in reversed(_numbered(output_dir)) if _finished_here(path)), None)


def _finished_here(checkpoint: Path) -> bool:
    if not is_complete(checkpoint):
        return False
    written = (checkpoint / TRAINER_STATE_NAME).stat().st_mtime_ns
    if any(not (shards / ".metadata").exists() for name in _SHARDED for shards in checkpoint.glob(name)):
        return False
    files = [checkpoint / name for name in _OPTIMIZER_FILES]
    return all(not file.exists() or file.stat().st_mtime_ns <= written for file in files)


def resolve(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """What Trainer should resume from, given what it was asked to.

    An unfinished checkpoint of this run's own output folder is passed over, with a warning, for the last finished one.

    Raises:
        ValueError: an unfinished checkpoint was named, or is all there is.
    """
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    folder = Path(output_dir)
    if resume_from_checkpoint is not True:
        named = Path(resume_from_checkpoint)
        here = named.resolve().parent == folder.resolve() and _CHECKPOINT.match(named.name) is not None
        if not named.is_dir() or (_finished_here if here else is_complete)(named):
            return resume_from_checkpoint
        if not here:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} was not finished ({TRAINER_STATE_NAME} is missing "
                "or damaged); name a finished checkpoint"
            )
    complete = last_complete(folder)
    unfinished = [path.name for step, path in _numbered(folder) if complete is None or step > _step(complete)]
    if complete is None:
        if unfinished:
            raise ValueError(
                f"no checkpoint in {output_dir!r} was finished; start again without resume_from_checkpoint"
            )
        return resume_from_checkpoint  # Trainer says that there is none
    if unfinished:
        logger.warning("%s was not finished; resuming from %s", ", ".join(unfinished), complete)
    return str(complete)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders with their steps, in order."""
    if not folder.is_dir():
        return []
    return sorted((_step(path), path) for path in folder.iterdir() if path.is_dir() and _CHECKPOINT.match(path.name))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
