"""What a user names on the command line: a model, a dataset, a file."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """What was asked for is not there or cannot be used; the message is for the user."""


def check_path(name: str, option: str, suffixes: Container[str] = ()) -> None:
    """Raise InputError if `name` looks like a path, or ends in one of `suffixes`, and nothing is there.

    It is not to be searched for on the hub then.
    """
    looks_local = name.startswith((".", "/", "~", "\\")) or Path(name).suffix in suffixes
    if looks_local and not Path(os.path.expanduser(name)).exists():
        raise InputError(f"{option}: there is no file or folder {name!r}")


@contextmanager
def input_errors(what: str, hint: str = "") -> Iterator[None]:
    """Loading fails in many ways (offline, no such name, not a model); its message says which, ours what for.

    `hint` is appended, what may be the cause.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # A line that ends so announces the one that matters.
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise InputError(f"{what}: {reason}{hint}") from error
