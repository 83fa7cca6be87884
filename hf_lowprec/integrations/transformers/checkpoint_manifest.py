"""The manifest of a checkpoint: which files were written, by which training, and whether all of them were.

Saving begins with a manifest that is not complete; it replaces the one of an earlier checkpoint of the same name before
anything else is written. The complete manifest, with the size and the checksum of every file, is written last. So a
checkpoint that a process left half-written is recognized, and one whose files were changed or mixed afterwards as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer import TRAINER_STATE_NAME

MANIFEST_NAME = "hf_lowprec_manifest.json"
FORMAT = 1
CHUNK = 1 << 24
"""Bytes of a file that one thread reads at a time."""
_THREADS = min(8, os.cpu_count() or 1)
_BEING_SAVED = "checkpoint-is-incomplete.txt"
"""Lies in a checkpoint while transformers' JITCheckpointCallback saves it; it is deleted afterwards."""
_LOADED_IF_PRESENT = (
    TRAINER_STATE_NAME,
    "optimizer.pt", "optimizer*.bin", "optimizer_[0-9]*", "scheduler.pt", "scaler.pt", "rng_state*.pth",
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*",
)  # fmt: skip
"""Files and folders that Trainer loads because they are there, whoever wrote them."""
_NEVER_LOADED = ("training_args.bin", "generation_config.json", "README.md")
"""Files that no Trainer needs to resume. That of sentence-transformers needs `config.json` and the tokenizer's."""


class FileRecord(NamedTuple):
    size: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        run: identifies the training; kept when it is resumed, so that it tells two trainings in one folder apart.
        saved: when saving began, in UTC; orders the checkpoints of several trainings, whatever the files' times are.
        global_step: Trainer's step.
        optimizer: the optimizer's class.
        rounding: the rounding modes of its groups, none for an optimizer of others.
        complete: whether every file was written.
        files: every file in the folder by its relative path, once it is complete.
    """

    run: str
    saved: str
    global_step: int
    optimizer: str
    rounding: list[str]
    complete: bool = False
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)


class ManifestWriter:
    """Writes the manifests of one training's checkpoints.

    Args:
        resumed: the manifest of the checkpoint that the training is resumed from; None for a new training.
    """

    def __init__(self, resumed: Manifest | None = None) -> None:
        self._run = resumed.run if resumed else uuid.uuid4().hex
        self._last_saved = resumed.saved if resumed else ""
        self._folder: Path | None = None
        self._manifest: Manifest | None = None
        self._stats: dict[str, tuple[int, ...]] = {}
        self._known: dict[str, FileRecord] = {}

    def begin(self, folder: Path, global_step: int, optimizer: object) -> None:
        """Mark `folder` as being written, then remove what Trainer would load of an earlier checkpoint there."""
        groups = getattr(optimizer, "param_groups", [])
        if self._folder is None:
            self._last_saved = max([self._last_saved, *_times_of_saving(folder.parent)])
        self._last_saved = _time_after(self._last_saved)
        self._folder, self._stats, self._known = folder, {}, {}
        self._manifest = Manifest(
            run=self._run,
            saved=self._last_saved,
            global_step=global_step,
            optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            rounding=sorted({group["rounding"] for group in groups if "rounding" in group}),
        )
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, self._manifest)
        for pattern in _LOADED_IF_PRESENT:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def add(self, records: dict[str, FileRecord]) -> None:
        """Take the checksums of other ranks' files from them, whose machines still have those files in memory."""
        self._known.update(records)

    def complete(self) -> None:
        """Write the complete manifest; called again, bring it up to date with files that have changed since."""
        if self._folder is None or self._manifest is None or not self._folder.is_dir():
            return
        stats = {name: _stat(self._folder / name) for name in _files(self._folder)}
        changed = {name for name, stat in stats.items() if self._stats.get(name) != stat}
        if self._manifest.complete and not changed and stats.keys() == self._stats.keys():
            return
        known = {name: self._known.pop(name) for name in changed if name in self._known}
        known = {name: record for name, record in known.items() if record.size == stats[name][0]}
        records = {**self._manifest.files, **_records(self._folder, changed - known.keys()), **known}
        files = {name: records[name] for name in stats}
        self._manifest = dataclasses.replace(self._manifest, complete=True, files=files)
        self._stats = stats
        _write(self._folder, self._manifest)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint, None if it has none.

    Raises:
        ValueError: it is damaged, or of a format that a later version writes.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    fields = read_json(path)
    if fields.pop("checksum", None) != _checksum_of_json(fields):
        raise ValueError(f"{MANIFEST_NAME} does not match its checksum")
    written_as = fields.pop("format", None)
    if written_as != FORMAT:
        raise ValueError(f"{MANIFEST_NAME} has format {written_as}, this version of hf_lowprec reads {FORMAT}")
    try:
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return Manifest(**fields, files=files)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST_NAME} is not a manifest: {error}") from error


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """A line for every file of a complete manifest that is not what was written, or is gone and needed to resume.

    Other files do not matter.
    """
    problems, same_size = [], []
    gone = missing_files(folder, manifest)
    try:
        for name, (written, _) in manifest.files.items():
            if name in gone:
                problems += [f"{name} is missing"] if gone[name] else []
            elif (size := (folder / name).stat().st_size) != written:
                problems.append(f"{name} has {size} bytes, {written} were written")
            else:
                same_size.append(name)
        found = checksums(folder / name for name in same_size)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read: {error.strerror}"]
    changed = [name for name in same_size if found[folder / name] != manifest.files[name].checksum]
    return [*problems, *(f"{name} does not match its checksum" for name in changed)]


def missing_files(folder: Path, manifest: Manifest) -> dict[str, bool]:
    """The files of a complete manifest that are gone, and whether each is needed to resume."""
    gone = (name for name in manifest.files if not (folder / name).is_file())
    return {name: name.rpartition("/")[2] not in _NEVER_LOADED for name in gone}


def records_of_rank(folder: Path, rank: int) -> dict[str, FileRecord]:
    """The sizes and checksums of the files that `rank` has written by itself, as their names tell."""
    by_rank = re.compile(rf"(^|/)(__|rng_state_|\w+_rank){rank}[_.]")  # of shards, random states, unsharded optimizers
    return _records(folder, [name for name in _files(folder) if by_rank.search(name)])


def _records(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    found = checksums(folder / name for name in names)
    return {
        path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, checksum)
        for path, checksum in found.items()
    }


def checksums(paths: Iterable[Path]) -> dict[Path, str]:
    """The checksum of every file: CRC-32 over the CRC-32s of its chunks.

    It finds every flipped bit, and other changes but for one in 2³². Several threads read and compute; a cryptographic
    hash takes several times as long.
    """
    chunks = [(path, start) for path in paths for start in range(0, max(path.stat().st_size, 1), CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        found: dict[Path, int] = {}
        for (path, _), crc in zip(chunks, pool.map(_crc_of_chunk, chunks), strict=True):
            found[path] = zlib.crc32(crc.to_bytes(4, "little"), found.get(path, 0))
    return {path: f"{crc:08x}" for path, crc in found.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it cannot be read, or holds something else; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _crc_of_chunk(chunk: tuple[Path, int]) -> int:
    path, start = chunk
    with path.open("rb") as file:  # buffered: a raw read may return less than asked for
        file.seek(start)
        return zlib.crc32(file.read(CHUNK))


def _times_of_saving(folder: Path) -> list[str]:
    """Of the checkpoints in `folder`, as their manifests have it; damaged ones say nothing."""
    times = []
    for path in folder.glob(f"*/{MANIFEST_NAME}"):
        with contextlib.suppress(OSError, ValueError):
            manifest = read_manifest(path.parent)
            times += [] if manifest is None else [manifest.saved]
    return times


def _time_after(earlier: str) -> str:
    """Now in UTC, but later than `earlier`: that may be of a machine whose clock is ahead. Empty is before all."""
    now = datetime.now(timezone.utc)
    if earlier:
        now = max(now, datetime.fromisoformat(earlier) + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _checksum_of_json(fields: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _write(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest at once: whoever reads it finds the one or the other."""
    fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
    fields["files"] = {name: record._asdict() for name, record in manifest.files.items()}
    content = json.dumps({**fields, "checksum": _checksum_of_json(fields)}, indent=1)
    temporary = folder / f"{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST_NAME)
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(MANIFEST_NAME) and name != _BEING_SAVED]


def _stat(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
