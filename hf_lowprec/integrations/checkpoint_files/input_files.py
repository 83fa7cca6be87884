"""Files and folders that a user names, which may come from elsewhere.

Their content is only data, and no file outside them is read. Errors about unusable ones are written for users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any


class InputError(ValueError):
    """The user named a model, dataset or file that does not exist or cannot be used.

    Commands print only the message, no traceback.
    """


@contextmanager
def explain_input_errors(what: str) -> Iterator[None]:
    """Turn any error inside into a one-line InputError: `what` and the error's reason.

    Loading fails in many ways (offline, no such name, not a model), and libraries raise many classes of errors.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # If the first line ends with a colon, the next one has the reason.
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise InputError(f"{what}: {reason}") from error


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
    """Return the path of a file in `folder` that the file `named_in` there refers to.

    Raises:
        ValueError: it is outside the folder; an untrusted checkpoint must not cause reads or writes there.
    """
    path = PurePath(name)
    if path.anchor or ".." in path.parts:
        raise ValueError(f"{named_in} names {name!r}, which is outside the checkpoint")
    return folder / path


def check_links(checkpoint: Path) -> None:
    """Raise ValueError if a link in a checkpoint leads out of it, or out of its folder in the Hub's cache."""
    folder = Path(os.path.realpath(checkpoint))
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    for path in checkpoint.rglob("*"):
        if not Path(target := os.path.realpath(path)).is_relative_to(root):
            raise ValueError(
                f"{path} is a link to {target}, outside the checkpoint; if you trust it, copy the checkpoint with "
                "the files that its links point to (cp -rL)"
            )
