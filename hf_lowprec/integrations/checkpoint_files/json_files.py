"""Reads JSON files of folders that may come from elsewhere, and nothing outside of these."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePath
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: the file cannot be read, or does not contain an object. The message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} does not contain a JSON object")
    return content


def path_inside(folder: Path, name: str, named_in: str) -> Path:
    """The path of a file in `folder` that the file `named_in` there refers to.

    Raises:
        ValueError: it is outside of the folder, where a checkpoint from elsewhere must not make anyone read or write.
    """
    path = PurePath(name)
    if path.anchor or ".." in path.parts:
        raise ValueError(f"{named_in} names {name!r}, which is outside of the checkpoint")
    return folder / path


def check_links(checkpoint: Path) -> None:
    """Raise ValueError if a link in a checkpoint leads out of it, or out of its folder in the Hub's cache."""
    folder = Path(os.path.realpath(checkpoint))
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    for path in checkpoint.rglob("*"):
        if not Path(target := os.path.realpath(path)).is_relative_to(root):
            raise ValueError(
                f"{path} is a link to {target}, outside of the checkpoint; if you trust it, copy the checkpoint with "
                "what its links name (cp -rL)"
            )
