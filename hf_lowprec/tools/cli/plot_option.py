"""The check of every `--plot` option."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer


def require_matplotlib(path: Path | None) -> Path | None:
    """Refuse to plot without matplotlib; a callback of typer, which names the option.

    Raises:
        typer.BadParameter: a file was given, and matplotlib is not installed.
    """
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("it needs matplotlib: pip install '.[plot]' in a clone of hf_lowprec")
    return path
