"""The error for a model, dataset or file that a user named and that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """The user named something that does not exist or cannot be used. Commands print only the message, no traceback."""


def check_path_exists(name: str, option: str) -> None:
    """Raise InputError if `name` looks like a path that does not exist, so that it is not searched for on the Hub.

    Args:
        name: the name as entered by the user.
        option: its option or argument, for the message.
    """
    if name.startswith((".", "/", "~", "\\")) and not Path(os.path.expanduser(name)).exists():
        raise InputError(f"{option}: there is no file or folder {name!r}")


@contextmanager
def explain_input_errors(what: str) -> Iterator[None]:
    """Turn any error inside into a one-line InputError: `what` and the error's reason.

    Loading fails in many ways (offline, no such name, not a model), for which libraries raise many classes of errors.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # If the first line ends with a colon, the next one has the reason.
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise InputError(f"{what}: {reason}") from error
