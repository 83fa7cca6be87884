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
        ValueError: the file cannot be read; the message names it.
    """
    fields = read_json(path)
    unknown = unknown_fields(fields, cls)
    return cls(**{name: value for name, value in fields.items() if name not in unknown})


def unknown_fields(state: dict[str, Any], cls: type[TrainerState] = TrainerState) -> list[str]:
    """The fields of a saved state that `cls` of this version of transformers does not have."""
    return sorted(state.keys() - {field.name for field in dataclasses.fields(cls)})
