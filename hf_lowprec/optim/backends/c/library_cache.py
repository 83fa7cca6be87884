"""The cache of compiled libraries, which later processes of the same user load instead of compiling again.

A library runs as this user, so the cache is used only if it belongs to this user or root, and nobody else can write to
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from hf_lowprec.once import first_time


def load(name: str, build: Callable[[Path], Path]) -> ctypes.CDLL:
    """Load the library `name` from the cache. If it is not there or cannot be loaded, build and cache it first.

    If it cannot be cached, it is built for this process only, with a warning.

    Args:
        name: the file's name.
        build: writes the library to an empty folder, which it is given, and returns its file.

    Raises:
        OSError: the library cannot be written anywhere, or cannot be loaded.
    """
    cache = _usable_cache()
    if cache is not None:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(cache / name))
    with tempfile.TemporaryDirectory(prefix="hf_lowprec-") as folder:
        library = build(Path(folder))
        return ctypes.CDLL(str(library if cache is None else _cached(library, cache / name)))


def _usable_cache() -> Path | None:
    """The cache's folder: `$HF_LOWPREC_CACHE`, else `hf_lowprec` in the user's cache directory.

    None, with a warning, if it cannot be created, belongs to another user, or others can write to it.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative path
    default = f"{user_cache if os.path.isabs(user_cache) else '~/.cache'}/hf_lowprec"
    try:
        folder = Path(os.environ.get("HF_LOWPREC_CACHE") or default).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to another user ({status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # there is no home directory
        _warn_not_cached(error)
        return None


def _cached(library: Path, target: Path) -> Path:
    """Copy `library` to `target`, atomically. Returns `target`; `library`, with a warning, if that is impossible."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            os.replace(shutil.copy(library, folder), target)
        return target
    except OSError as error:
        _warn_not_cached(error)
        return library


def _warn_not_cached(reason: Exception) -> None:
    if first_time(f"not cached: {reason}"):
        warnings.warn(
            f"compiled steps cannot be cached: {reason}; each process compiles them again (about a third of a second "
            "per step); set HF_LOWPREC_CACHE to a folder that only this user can write to",
            RuntimeWarning,
            stacklevel=2,
        )
