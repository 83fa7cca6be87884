"""Writes and reads the manifest of a checkpoint: its files with their checksums, the run that saved it, and whether
saving was completed.

Before anything else is written, an incomplete manifest replaces that of an earlier checkpoint with the same name. The
complete manifest, with the size and checksum of every file, follows when all ranks and callbacks have written theirs.
When resuming, it shows if files were changed or mixed up later. `damage.py` says what an incomplete one is good for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer import TRAINER_STATE_NAME

from hf_lowprec.integrations.checkpoint_files.json_files import read_json

logger = logging.getLogger(__name__)

MANIFEST_NAME = "hf_lowprec_manifest.json"
FORMAT = 1
CHUNK_BYTES = 1 << 24
"""Bytes of a file that one thread reads at a time for its checksum."""
_THREADS = min(8, os.cpu_count() or 1)
_BEING_SAVED = "checkpoint-is-incomplete.txt"
"""A file that transformers' JITCheckpointCallback keeps in a checkpoint while it saves it."""
_LOADED_IF_PRESENT = (
    "optimizer.pt", "optimizer*.bin", "optimizer_[0-9]*", "scheduler.pt", "scaler.pt", "rng_state*.pth",
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*",
)  # fmt: skip
"""Files and folders that are loaded if they exist, even those of an earlier checkpoint in the same folder."""
_ENDS_OF_FILES = {
    ".bin", ".jinja", ".json", ".jsonl", ".md", ".model", ".pt", ".pth", ".py", ".safetensors", ".tmp", ".txt",
}  # fmt: skip
"""Ends of the names of files that are written to a checkpoint."""
_CANNOT_SYNC = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of `fsync` on file systems that lack it, for directories or at all. Others, such as EIO, mean lost data."""


class FileRecord(NamedTuple):
    """A file's size in bytes and its checksum (see `checksums`) at the time it was written."""

    size: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        run: identifies the run that saved the checkpoint. A resumed run keeps it; different runs that save to the same
            folder have different ones.
        saved: when saving began, in UTC. It orders the checkpoints of several runs; file times cannot, since copying
            changes them.
        global_step: Trainer's global step.
        optimizer: the optimizer's class.
        random_states: the files of random states that ranks write here, each its own.
        complete: whether every file was written.
        files: every file in the folder by its relative path, once the manifest is complete.
    """

    run: str
    saved: str
    global_step: int
    optimizer: str
    random_states: list[str] = dataclasses.field(default_factory=list)
    complete: bool = False
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)


class ManifestWriter:
    """Writes the manifests of one run's checkpoints; the Trainer keeps one writer per run.

    Args:
        resumed: the manifest of the checkpoint that the run resumes from; None for a new run.

    Attributes:
        folder: the checkpoint that is being saved, on every rank; None between two.
    """

    def __init__(self, resumed: Manifest | None = None) -> None:
        self._run = resumed.run if resumed else uuid.uuid4().hex
        self._last_saved = resumed.saved if resumed else ""
        self.folder: Path | None = None
        self._manifest: Manifest | None = None

    def begin(self, folder: Path, global_step: int, optimizer: object, random_states: list[str]) -> None:
        """Write an incomplete manifest to `folder`, and remove files of an earlier checkpoint that Trainer reads.

        Directories and dangling links where files will be written are removed, too.
        """
        if self._manifest is None:
            earlier = _manifests(folder.parent)
            self._last_saved = max([self._last_saved, *(manifest.saved for manifest in earlier.values())])
            if others := [name for name, manifest in earlier.items() if manifest.run != self._run]:
                logger.warning(
                    "hf_lowprec: %s has checkpoints of another training run (%d, the first is %s). This run replaces "
                    "those whose steps it reaches, and save_total_limit counts them: use another output_dir to keep "
                    "them",
                    folder.parent,
                    len(others),
                    others[0],
                )
        self._last_saved = _time_after(self._last_saved)
        self._manifest = Manifest(
            run=self._run,
            saved=self._last_saved,
            global_step=global_step,
            optimizer=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            random_states=random_states,
        )
        folder.mkdir(parents=True, exist_ok=True)
        # First the file without which no checkpoint is good: a kill must not leave the old one under the new manifest.
        _remove([folder / TRAINER_STATE_NAME])
        _remove(path for path in [*folder.rglob("*")] if path.suffix in _ENDS_OF_FILES and not path.is_file())
        _write(folder, self._manifest)
        for pattern in _LOADED_IF_PRESENT:
            _remove(folder.glob(pattern))

    def complete(self, folder: Path, records: Mapping[str, FileRecord]) -> None:
        """Write the complete manifest of the checkpoint that was begun.

        Args:
            folder: the checkpoint.
            records: those of files that single ranks have written, whose machines still have them in memory.
        """
        if self._manifest is None or not folder.is_dir():
            return
        names = _files(folder)
        files = {**records, **_records(folder, names - records.keys())}
        files = {name: files[name] for name in sorted(names)}
        _write(folder, dataclasses.replace(self._manifest, complete=True, files=files))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it has none.

    Raises:
        ValueError: the manifest is damaged, or has the format of a later version.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    fields = read_json(path)
    if fields.pop("checksum", None) != _checksum_of_json(fields):
        raise ValueError(f"{MANIFEST_NAME} does not match its checksum")
    saved_format = fields.pop("format", None)
    if saved_format != FORMAT:
        raise ValueError(
            f"{MANIFEST_NAME} has format {saved_format}, but this version of hf_lowprec reads format {FORMAT}"
        )
    try:
        fields["files"] = {name: FileRecord(**record) for name, record in fields["files"].items()}
        known = {field.name for field in dataclasses.fields(Manifest)}  # earlier ones also have the rounding modes
        return Manifest(**{name: value for name, value in fields.items() if name in known})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST_NAME} is not a manifest: {error}") from error


def records_of_rank(folder: Path, rank: int) -> dict[str, FileRecord]:
    """The sizes and checksums of the files that only `rank` has written, recognized by their names."""
    # Shards, random states, unsharded optimizers.
    by_rank = re.compile(rf"(^|/)(__|rng_state_|\w+_rank){rank}[_.]")
    return _records(folder, [name for name in _files(folder) if by_rank.search(name)])


def _records(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    return {
        path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, checksum)
        for path, checksum in checksums(folder / name for name in names).items()
    }


def _manifests(folder: Path) -> dict[str, Manifest]:
    """The manifests of the checkpoints in `folder` by name; damaged ones are left out."""
    manifests = {}
    for path in sorted(folder.glob(f"*/{MANIFEST_NAME}")):
        with contextlib.suppress(OSError, ValueError):
            if (manifest := read_manifest(path.parent)) is not None:
                manifests[path.parent.name] = manifest
    return manifests


def _time_after(earlier: str) -> str:
    """The time in UTC, but later than `earlier`, which may come from a machine whose clock is ahead; "" means none."""
    now = datetime.now(timezone.utc)
    if earlier:
        now = max(now, datetime.fromisoformat(earlier) + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _checksum_of_json(fields: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _write(folder: Path, manifest: Manifest) -> None:
    fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
    fields["files"] = {name: record._asdict() for name, record in manifest.files.items()}
    content = json.dumps({**fields, "checksum": _checksum_of_json(fields)}, indent=1)
    replace_file(folder / MANIFEST_NAME, content + "\n")


def replace_file(path: Path, content: str) -> None:
    """Write a file atomically: a reader finds either the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        _sync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Wait until a file or directory is on disk, if its file system can do that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _files(folder: Path) -> set[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith(MANIFEST_NAME) and name != _BEING_SAVED}


def checksums(paths: Iterable[Path]) -> dict[Path, str]:
    """Compute the checksum of every file: CRC-32 over the CRC-32s of its chunks.

    It detects every flip of a single bit, and all but one in 2³² other changes. A cryptographic hash would take several
    times as long.

    Raises:
        OSError: a file cannot be read.
    """
    chunks = [(path, start) for path in paths for start in range(0, max(path.stat().st_size, 1), CHUNK_BYTES)]
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs: dict[Path, int] = {}
        for (path, _), crc in zip(chunks, pool.map(_crc_of_chunk, chunks), strict=True):
            crcs[path] = zlib.crc32(crc.to_bytes(4, "little"), crcs.get(path, 0))
    return {path: f"{crc:08x}" for path, crc in crcs.items()}


def _crc_of_chunk(chunk: tuple[Path, int]) -> int:
    path, start = chunk
    with path.open("rb") as file:  # buffered: an unbuffered read may return less than it was asked for
        file.seek(start)
        return zlib.crc32(file.read(CHUNK_BYTES))
