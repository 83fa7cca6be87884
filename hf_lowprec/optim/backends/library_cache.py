"""The cache of compiled libraries: files that outlive the process, to be run by this user in the next one.

A library is loaded only if it is whole, and if nobody but this user and root can have put it there. Both are checked
on the bytes that are loaded: a file is read once, through one descriptor, and what was read is loaded from memory. A
file that is exchanged or truncated later reaches no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import grp
import hashlib
import itertools
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

Result = TypeVar("Result")

SCRATCH = "hf_lowprec-build-"
"""Prefix of a build's temporary files and folders."""
ABANDONED_AFTER = 3600.0
"""Seconds after which a temporary file is left over from a build that was killed; a build takes minutes at most."""

MOST_LINKS = 40
"""Symbolic links that are followed in one path, as many as Linux follows."""

_loads = itertools.count(1)


def load(name: str, functions: Sequence[str], build: Callable[[Path], bytes]) -> ctypes.CDLL:
    """The library called `name`, from the cache, or built and put there.

    A file in the cache that cannot be used is replaced, with a warning. Where nothing can be kept, also with a warning,
    the library is built for this process alone.

    Args:
        name: of its file.
        functions: the functions that it must have.
        build: makes its bytes, given an empty folder to work in.

    Raises:
        OSError: what was built can be written nowhere, or not be loaded.
    """
    cache = _usable_cache()
    if cache is not None:
        try:
            library = _read(cache / name)
            if library is not None:
                return _open(library, functions, cache)
        except OSError as error:
            warnings.warn(
                f"the compiled step {cache / name} is not used, and compiled again: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    library = _in_scratch(build, cache)
    opened = _open(library, functions, cache)
    if cache is not None:
        try:
            _publish(cache / name, library)
        except OSError as error:
            _warn_not_kept(str(error))
    return opened


def cache_dir() -> Path:
    """Where compiled steps are kept: `$HF_LOWPREC_CACHE`, else `hf_lowprec` in the user's cache directory.

    Raises:
        FileNotFoundError: the path begins at a home directory and there is none.
    """
    wanted = os.environ.get("HF_LOWPREC_CACHE")
    if wanted:
        return _absolute(wanted)
    general = os.environ.get("XDG_CACHE_HOME", "")  # which counts only if it is absolute
    return (Path(general) if os.path.isabs(general) else _absolute("~/.cache")) / "hf_lowprec"


@functools.cache  # so that a process that changes its directory keeps its cache
def _absolute(path: str) -> Path:
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{path}: {error}") from None
    return expanded if expanded.is_absolute() else Path.cwd() / expanded


def _usable_cache() -> Path | None:
    try:
        return _trusted_folder(cache_dir())
    except OSError as error:
        _warn_not_kept(str(error))
        return None


@functools.cache
def _warn_not_kept(reason: str) -> None:
    warnings.warn(
        f"compiled steps cannot be kept: {reason}; each process compiles its own (about a third of a second each); set "
        "HF_LOWPREC_CACHE to a folder that only this user can write to",
        RuntimeWarning,
        stacklevel=2,
    )


def _trusted_folder(path: Path) -> Path:
    """The absolute `path` without symbolic links, made if it is missing, if only this user and root can write there.

    Raises:
        OSError: others can write there, or can put another folder in its place; or it cannot be made.
    """
    folder = _real_path(path)
    status = folder.lstat()
    _check_owner(status, folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if _others_can_write(status):
        raise PermissionError(f"others can write to {folder}")
    return folder


def _real_path(path: Path) -> Path:
    """The absolute `path` without symbolic links, made if it is missing, if nobody else can exchange any part of it.

    Goes down from the root, so that a folder is known not to be exchangeable before anything is looked up in it.

    Raises:
        OSError: others can exchange a part, it cannot be made, or it has more links than Linux follows.
    """
    folder, names, links = Path(path.anchor), list(path.parts[:0:-1]), 0
    while names:
        entry = folder / names.pop()
        if not stat.S_ISLNK(_checked_entry(folder, entry).st_mode):
            folder = entry
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = folder / entry.readlink()
        folder, names = Path(target.anchor), [*names, *target.parts[:0:-1]]
    return folder


def _checked_entry(folder: Path, entry: Path) -> os.stat_result:
    """The status of `entry` of `folder`, made if it is missing.

    Raises:
        OSError: others can exchange it, or it cannot be made.
    """
    above = folder.lstat()
    shared = _others_can_write(above)
    if shared and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(f"others can write to {folder}")
    try:
        status = entry.lstat()
    except FileNotFoundError:
        entry.mkdir(mode=0o700, exist_ok=True)
        status = entry.lstat()
    _check_owner(status, entry, foreign_root=not shared)
    return status


def _check_owner(status: os.stat_result, what: Path | str, foreign_root: bool = False) -> None:
    """Raise PermissionError unless `what` belongs to this user or to root; root may be that of another namespace."""
    if status.st_uid not in {0, os.geteuid(), *(_unmapped_users() if foreign_root else ())}:
        raise PermissionError(f"{what} belongs to another user ({status.st_uid})")


@functools.cache
def _unmapped_users() -> frozenset[int]:
    """What the root user of the machine appears as in a container that was started without privileges."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return frozenset([int(Path("/proc/sys/kernel/overflowuid").read_text())])
    return frozenset()


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status)


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group is its owner's alone, as on systems that give each user a group of the same name."""
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _read(file: Path) -> bytes | None:
    """The library that `file` holds; None if there is no such file.

    Raises:
        OSError: it is not a file, cannot be read, is damaged, or may have been written by others.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe is opened without waiting
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file")
        _check_owner(status, "it")
        if _others_can_write(status):
            raise PermissionError("others can write to it")
        with open(descriptor, "rb", closefd=False) as opened:
            content = opened.read()
    finally:
        os.close(descriptor)
    size = len(_checksum(file.name, b""))
    library, checksum = content[:-size], content[-size:]
    if checksum != _checksum(file.name, library):
        raise OSError("its checksum is wrong")
    return library


def _checksum(name: str, library: bytes) -> bytes:
    """Of a library under its name: the library of another layout is not the right one either."""
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


def _publish(file: Path, library: bytes) -> None:
    """Write `library`, and its checksum after it."""
    _remove_abandoned(file.parent)
    descriptor, temporary = tempfile.mkstemp(prefix=SCRATCH, dir=file.parent)
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


def _open(library: bytes, functions: Sequence[str], cache: Path | None) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: it cannot be loaded, or lacks one of `functions`.
    """
    opened = None
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # without /proc, or where the kernel forbids it
            opened = _open_in_memory(library)
    if opened is None:
        opened = _in_scratch(functools.partial(_open_copy, library), cache)
    for function in functions:
        if not hasattr(opened, function):
            raise OSError(f"it has no function {function!r}")
    return opened


def _open_in_memory(library: bytes) -> ctypes.CDLL:
    descriptor = os.memfd_create("hf_lowprec")
    try:
        with open(descriptor, "wb", closefd=False) as opened:
            opened.write(library)
        # For a path that it has loaded before glibc returns the library it has, whatever the descriptor is now.
        return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_loads)}{descriptor}")
    finally:
        os.close(descriptor)


def _open_copy(library: bytes, folder: Path) -> ctypes.CDLL:
    copy = folder / "library.so"
    copy.write_bytes(library)
    return ctypes.CDLL(str(copy))


def _in_scratch(work: Callable[[Path], Result], cache: Path | None) -> Result:
    """What `work` returns, given an empty folder that only this user can write to.

    The folder lies where temporary files do, or in the cache if it cannot be there.

    Raises:
        OSError: of `work`, or because there is no place for such a folder.
    """
    reasons = []
    for parent in (tempfile.gettempdir, lambda: cache):
        try:
            if (place := parent()) is not None:
                with _scratch_folder(Path(place)) as folder:
                    return work(folder)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


@contextlib.contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
    try:
        folder = _trusted_folder(made)
    except OSError:
        made.rmdir()  # which removes no file: others could have put another folder there
        raise
    try:
        _remove_abandoned(folder.parent)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what builds that were killed have left in `parent`."""
    for left in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            status = left.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > ABANDONED_AFTER:
                shutil.rmtree(left) if stat.S_ISDIR(status.st_mode) else left.unlink()
