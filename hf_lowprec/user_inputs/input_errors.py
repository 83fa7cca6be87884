"""The error for a model, dataset or file that a user named and that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """The user named something that does not exist or cannot be used; commands print the message and no traceback."""


def check_path_exists(name: str, option: str, suffixes: Container[str] = ()) -> None:
    """Raise InputError if `name` looks like a path and nothing is there; it must not be searched for on the hub.

    Args:
        name: as the user gave it.
        option: the option or argument it was given for, for the message.
        suffixes: suffixes by which a name counts as a path.
    """
    looks_local = name.startswith((".", "/", "~", "\\")) or Path(name).suffix in suffixes
    if looks_local and not Path(os.path.expanduser(name)).exists():
        raise InputError(f"{option}: there is no file or folder {name!r}")


@contextmanager
def explain_input_errors(what: str, hint: str = "") -> Iterator[None]:
    """Turn any error inside into an InputError of one line: `what`, the reason that the error gives, and `hint`.

    Loading fails in many ways (offline, no such name, not a model), and libraries raise many classes for them.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # A first line that ends with a colon announces the one that matters.
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise InputError(f"{what}: {reason}{hint}") from error
