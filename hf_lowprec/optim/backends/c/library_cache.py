"""The cache of compiled libraries, which later processes of the same user load instead of compiling again.

A library from the cache runs as this user, so it is loaded only if its checksum is correct, it belongs to this user or
root, and nobody else can write to it or to the cache's folder. The folders above need no check: whoever can exchange
them cannot create a file that belongs to this user. What is loaded is a private copy of the bytes that were checked, so
replacing or truncating the file afterwards affects no process, not even on a network file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from hf_lowprec.once import first_time

Result = TypeVar("Result")

SCRATCH_PREFIX = "hf_lowprec-build-"
"""Prefix of the names of a build's temporary files and folders."""
ABANDONED_AFTER = 3600.0
"""Age in seconds from which a temporary file must belong to a build that was killed; builds take minutes at most."""


def load(name: str, functions: Sequence[str], build: Callable[[Path], bytes]) -> ctypes.CDLL:
    """Load the library `name` from the cache; build and cache it first if it is not there.

    A cached file that cannot be used is replaced, with a warning. If the library cannot be cached, it is built for
    this process only, also with a warning.

    Args:
        name: the file's name.
        functions: names of the functions that the library must have.
        build: returns the library's bytes, given an empty folder for its temporary files.

    Raises:
        OSError: the built library cannot be written anywhere, or cannot be loaded.
    """
    cache = _usable_cache()
    if cache is not None:
        try:
            library = _read(cache / name)
            if library is not None:
                return _load_bytes(library, functions, cache)
        except OSError as error:
            warnings.warn(
                f"the cached step {cache / name} cannot be used and is compiled again: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    library = _in_scratch_folder(build, cache)
    loaded = _load_bytes(library, functions, cache)
    if cache is not None:
        try:
            _write(cache / name, library)
        except OSError as error:
            _warn_not_cached(str(error))
    return loaded


def cache_dir() -> Path:
    """The cache's folder: `$HF_LOWPREC_CACHE`, else `hf_lowprec` in the user's cache directory.

    Raises:
        FileNotFoundError: the path is relative to a home directory that does not exist.
    """
    path = os.environ.get("HF_LOWPREC_CACHE")
    if path:
        return _absolute(path)
    user_cache = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative path
    return (Path(user_cache) if os.path.isabs(user_cache) else _absolute("~/.cache")) / "hf_lowprec"


@functools.cache  # a process keeps its cache when it changes its working directory
def _absolute(path: str) -> Path:
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{path}: {error}") from None
    return expanded if expanded.is_absolute() else Path.cwd() / expanded


def _usable_cache() -> Path | None:
    """The cache's folder; None, with a warning, if there cannot be one or others could write to it."""
    try:
        folder = cache_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder.stat(), folder)
        return folder
    except OSError as error:
        _warn_not_cached(str(error))
        return None


def _warn_not_cached(reason: str) -> None:
    if first_time(f"not cached: {reason}"):
        warnings.warn(
            f"compiled steps cannot be cached: {reason}; each process compiles them again (about a third of a second "
            "per step); set HF_LOWPREC_CACHE to a folder that only this user can write to",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_private(status: os.stat_result, path: Path) -> None:
    """Raise PermissionError unless the file or folder belongs to this user or root, and nobody else can write to it."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user ({status.st_uid})")
    if _others_can_write(status):
        raise PermissionError(f"others can write to {path}")


def _others_can_write(status: os.stat_result) -> bool:
    """Return whether users other than the owner can write; a group whose only member is the owner does not count."""
    if not status.st_mode & stat.S_IWGRP or status.st_mode & stat.S_IWOTH:
        return bool(status.st_mode & stat.S_IWOTH)
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name != owner or not set(group.gr_mem) <= {owner}


def _read(file: Path) -> bytes | None:
    """The library in `file`; None if there is no such file.

    Raises:
        OSError: `file` cannot be read, is damaged, or may have been written by others.
    """
    try:
        with open(file, "rb") as opened:
            _check_private(os.fstat(opened.fileno()), file)
            content = opened.read()
    except FileNotFoundError:
        return None
    size = len(_checksum(file.name, b""))
    library, checksum = content[:-size], content[-size:]
    if checksum != _checksum(file.name, library):
        raise OSError("its checksum is wrong")
    return library


def _checksum(name: str, library: bytes) -> bytes:
    """The checksum of a library and its name, so that a library stored under another's name is rejected."""
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


def _write(file: Path, library: bytes) -> None:
    """Write `library` and its checksum to `file`, atomically."""
    _remove_abandoned(file.parent)
    descriptor, temporary = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(library + _checksum(file.name, library))
            opened.flush()
            os.fsync(descriptor)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _load_bytes(library: bytes, functions: Sequence[str], cache: Path | None) -> ctypes.CDLL:
    """Load a library that is in memory.

    Raises:
        OSError: it cannot be loaded, or lacks one of `functions`.
    """
    loaded = _in_scratch_folder(functools.partial(_load_copy, library), cache)
    for function in functions:
        if not hasattr(loaded, function):
            raise OSError(f"it has no function {function!r}")
    return loaded


def _load_copy(library: bytes, folder: Path) -> ctypes.CDLL:
    copy = folder / "library.so"
    copy.write_bytes(library)
    return ctypes.CDLL(str(copy))


def _in_scratch_folder(function: Callable[[Path], Result], cache: Path | None) -> Result:
    """Call `function` with an empty folder that only this user can write to, and remove the folder.

    The folder is created in the system's folder for temporary files or, if that is impossible, in the cache.

    Raises:
        OSError: from `function`, or because neither place can hold such a folder.
    """
    reasons = []
    for find_parent in (tempfile.gettempdir, lambda: cache):
        try:
            if (parent := find_parent()) is not None:
                with _scratch_folder(Path(parent)) as folder:
                    return function(folder)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


@contextlib.contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    status = parent.stat()
    if _others_can_write(status) and not status.st_mode & stat.S_ISVTX:  # they could exchange the new folder
        raise PermissionError(f"others can write to {parent}")
    _remove_abandoned(parent)
    folder = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove temporary files in `parent` that belong to builds that were killed."""
    for path in parent.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > ABANDONED_AFTER:
                shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else path.unlink()
