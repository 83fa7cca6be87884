"""Check that nobody but this user and root can have put a file or folder in place.

`library_cache.py` checks this before it runs code from a file, or writes code that a later process will run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from pathlib import Path

MAX_LINKS = 40
"""Maximum number of symbolic links followed in one path, the same as Linux's."""


def trusted_folder(path: Path) -> Path:
    """Resolve the absolute `path` of a folder to which only this user and root can write; create it if missing.

    Returns:
        The path without symbolic links.

    Raises:
        OSError: others can write to the folder or replace a part of its path, or it cannot be created.
    """
    folder = resolve(path)
    status = folder.lstat()
    check_owner(status, folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if others_can_write(status):
        raise PermissionError(f"others can write to {folder}")
    return folder


def resolve(path: Path) -> Path:
    """Resolve the symbolic links of the absolute `path`, check that others can replace no part of it, and create
    missing folders.

    Works from the root downwards, so that each folder is checked before anything is looked up in it.

    Raises:
        OSError: others can replace a part of the path, it cannot be created, or it has more than `MAX_LINKS` links.
    """
    folder, names, links = Path(path.anchor), list(path.parts[:0:-1]), 0
    while names:
        entry = folder / names.pop()
        if not stat.S_ISLNK(_check_entry(folder, entry).st_mode):
            folder = entry
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = folder / entry.readlink()
        folder, names = Path(target.anchor), [*names, *target.parts[:0:-1]]
    return folder


def _check_entry(folder: Path, entry: Path) -> os.stat_result:
    """Return the status of `entry`, which lies in `folder`; create it as a folder if it is missing.

    Raises:
        OSError: others can replace it, or it cannot be created.
    """
    parent = folder.lstat()
    shared = others_can_write(parent)
    if shared and not parent.st_mode & stat.S_ISVTX:
        raise PermissionError(f"others can write to {folder}")
    try:
        status = entry.lstat()
    except FileNotFoundError:
        entry.mkdir(mode=0o700, exist_ok=True)
        status = entry.lstat()
    check_owner(status, entry, allow_unmapped_root=not shared)
    return status


def check_owner(status: os.stat_result, path: Path | str, allow_unmapped_root: bool = False) -> None:
    """Raise PermissionError unless this user or root owns the file.

    Args:
        status: the file's status.
        path: the file, for the message.
        allow_unmapped_root: accept the user ID by which a container sees the host's root. The container sees all other
            users of the host by the same ID, so this is safe only where no other user can have created the file.
    """
    if status.st_uid not in {0, os.geteuid(), *(_unmapped_users() if allow_unmapped_root else ())}:
        raise PermissionError(f"{path} belongs to another user ({status.st_uid})")


@functools.cache
def _unmapped_users() -> frozenset[int]:
    """The user ID by which an unprivileged container sees the host's root; empty outside such containers."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return frozenset([int(Path("/proc/sys/kernel/overflowuid").read_text())])
    return frozenset()


def others_can_write(status: os.stat_result) -> bool:
    """Return whether the file's mode allows users other than its owner to write to it."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status)


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the owner is the group's only member; some systems give each user a group of the same name."""
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
