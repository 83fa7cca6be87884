"""Reads `trainer_state.json`, including files written by another version of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_lowprec.integrations.checkpoint_files.json_files import read_json


def read_trainer_state(path: Path, cls: type[TrainerState] = TrainerState) -> TrainerState:
    """Read a Trainer's state as a `cls`, ignoring fields that this version of transformers does not have.

    Raises:
        ValueError: the file is missing or damaged; the message names it.
    """
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    fields = read_json(path)
    unknown = unknown_fields(fields, cls)
    try:
        state = cls(**{name: value for name, value in fields.items() if name not in unknown})
    except TypeError as error:
        raise ValueError(f"{path.name} is not a Trainer's state: {error}") from error
    kinds = {"global_step": int, "train_batch_size": int, "log_history": list, "stateful_callbacks": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(state, name), kind):
            raise ValueError(f"{path.name} has {name}={getattr(state, name)!r}")
    return state


def unknown_fields(state: dict[str, Any], cls: type[TrainerState] = TrainerState) -> list[str]:
    """The fields of a saved state that `cls` of this version of transformers does not have."""
    return sorted(state.keys() - {field.name for field in dataclasses.fields(cls)})
