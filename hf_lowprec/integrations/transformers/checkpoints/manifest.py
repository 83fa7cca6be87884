"""Writes and reads the manifest of a checkpoint: the names and sizes of its files, once all of them are written.

A job can be killed between any two files of a checkpoint. An unfinished manifest is written before all of them, and the
finished one after them, so a checkpoint whose manifest matches its files is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from hf_lowprec.integrations.checkpoint_files.input_files import read_json

MANIFEST_NAME = "hf_lowprec_manifest.json"
FORMAT = 2
_NO_CONTENT = (MANIFEST_NAME, "checkpoint-is-incomplete.txt")
"""The manifest, and a file that transformers' JITCheckpointCallback keeps in a checkpoint while it saves it."""
_SHOWN = 5
"""The largest number of files that a message names."""


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        saved: when it was written. It orders the checkpoints in a folder, which may come from several runs.
        files: the size of every file in bytes by its relative path; None if saving was not finished.
    """

    saved: datetime
    files: dict[str, int] | None


def begin_checkpoint(folder: Path) -> None:
    """Turn `folder` into an empty, unfinished checkpoint; an earlier one there is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, None)  # first, so that a kill leaves no part of the earlier one that looks complete
    for path in folder.iterdir():
        if path.name not in _NO_CONTENT:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def finish_checkpoint(folder: Path) -> None:
    """Write the manifest of the files that are in `folder` now."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    _write(folder, {name: sizes[name] for name in sorted(sizes) if name not in _NO_CONTENT})


def _write(folder: Path, files: dict[str, int] | None) -> None:
    saved = datetime.now(timezone.utc)
    for path in folder.parent.glob(f"*/{MANIFEST_NAME}"):
        with contextlib.suppress(ValueError):
            if (other := read_manifest(path.parent)) is not None:  # perhaps of a machine whose clock was ahead
                saved = max(saved, other.saved + timedelta(microseconds=1))
    content = {"format": FORMAT, "saved": saved.isoformat(timespec="microseconds"), "files": files}
    replace_file(folder / MANIFEST_NAME, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it has none.

    Raises:
        ValueError: it is damaged, or has the format of a later version.
    """
    if not os.path.isfile(folder / MANIFEST_NAME):
        return None
    fields = read_json(folder / MANIFEST_NAME)
    try:
        saved, files = datetime.fromisoformat(fields["saved"]), fields["files"]
        if fields["format"] == 1:  # it also has checksums
            files = {name: record["size"] for name, record in files.items()} if fields["complete"] else None
        elif fields["format"] != FORMAT:
            raise ValueError(f"it has format {fields['format']}, and this version of hf_lowprec reads format {FORMAT}")
        return Manifest(saved, None if files is None else dict(files))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{MANIFEST_NAME} cannot be used: {error}") from error


class Examined(NamedTuple):
    """The result of comparing a checkpoint with its manifest.

    Attributes:
        saved: when the manifest was written, in seconds; 0 if there is none, or if it cannot be read.
        problems: what is wrong with each file, or with the manifest; empty if they match, or without a manifest.
    """

    saved: float
    problems: list[str]


def examine(folder: Path) -> Examined:
    """Compare a checkpoint with its manifest."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return Examined(0, [str(error)])
    if manifest is None:
        return Examined(0, [])
    problems = ["saving was not finished"] if manifest.files is None else []
    for name, size in (manifest.files or {}).items():
        try:
            size_now = (folder / name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        else:
            if size_now != size:
                problems.append(f"{name} has {size_now} bytes instead of {size}")
    return Examined(manifest.saved.timestamp(), problems)


def listing(problems: list[str]) -> str:
    """Join the first problems, for a message."""
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return ", ".join(problems[:_SHOWN]) + more


def check_files(folder: Path, argument: str, found: list[str] | None = None) -> None:
    """Raise ValueError if a checkpoint differs from its manifest.

    Args:
        folder: the checkpoint.
        argument: the argument that it was passed as, for the message.
        found: the differences, if they are known.
    """
    if found := examine(folder).problems if found is None else found:
        changed = f", or delete its {MANIFEST_NAME} if you changed the files on purpose"
        raise ValueError(
            f"{argument}={str(folder)!r} is not a complete checkpoint: {listing(found)}. Pass another one"
            f"{changed if (folder / MANIFEST_NAME).exists() else ''}"
        )


def replace_file(path: Path, content: str) -> None:
    """Write a file atomically: a reader finds either the old content or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)
