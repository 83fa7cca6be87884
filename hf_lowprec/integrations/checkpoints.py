"""Which checkpoint to resume from, when the last one may have been cut short.

Trainer writes `trainer_state.json` last, so a folder in which it is missing or unreadable was not finished.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

TRAINER_STATE_NAME = "trainer_state.json"
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
    if not output_dir.is_dir():
        return None
    numbered = [
        (int(m[1]), path) for path in output_dir.iterdir() if path.is_dir() and (m := _CHECKPOINT.match(path.name))
    ]
    return next((path for _, path in sorted(numbered, reverse=True) if is_complete(path)), None)


def resolve(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """What Trainer should resume from, given what it was asked to.

    An unfinished checkpoint of this run's own output folder is passed over, with a warning, for the last finished one.

    Raises:
        ValueError: an unfinished checkpoint was named, or is all there is.
    """
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    folder = Path(output_dir)
    if resume_from_checkpoint is True:
        asked = None
    else:
        asked = Path(resume_from_checkpoint)
        if not asked.is_dir() or is_complete(asked):
            return resume_from_checkpoint
    complete = last_complete(folder)
    if asked is not None and (asked.resolve().parent != folder.resolve() or not _CHECKPOINT.match(asked.name)):
        raise ValueError(
            f"resume_from_checkpoint={str(asked)!r} was not finished ({TRAINER_STATE_NAME} is missing or damaged); name "
            "a finished checkpoint"
        )
    unfinished = _newer(folder, complete) if folder.is_dir() else []
    if complete is None:
        if unfinished:
            raise ValueError(
                f"no checkpoint in {output_dir!r} was finished; start again without resume_from_checkpoint"
            )
        return resume_from_checkpoint  # Trainer says that there is none
    if unfinished:
        names = ", ".join(sorted(path.name for path in unfinished))
        logger.warning("%s was not finished; resuming from %s, the last complete checkpoint", names, complete)
    return str(complete)


def _newer(folder: Path, complete: Path | None) -> list[Path]:
    step = int(_CHECKPOINT.match(complete.name)[1]) if complete else -1  # type: ignore[index]
    return [path for path in folder.iterdir() if (m := _CHECKPOINT.match(path.name)) and int(m[1]) > step]
