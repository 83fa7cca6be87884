"""What a user names on the command line: a model, a dataset, a file."""

from __future__ import annotations

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
    if looks_local and not Path(name).expanduser().exists():
        raise InputError(f"{option}: there is no file or folder {name!r}")


@contextmanager
def input_errors(what: str) -> Iterator[None]:
    """Loading fails in many ways (offline, no such name, not a model); its message says which, ours what for."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{what}: {reason}") from error
