"""The oldest transformers and accelerate that the integrations support; `pyproject.toml` says the same.

The core needs neither, and works with older versions installed.
"""

from __future__ import annotations

from importlib import metadata

OLDEST = {"transformers": "5.5.4", "accelerate": "1.11"}
COMMAND_LINE = ("typer", "rich", "packaging", "safetensors")
"""The libraries that the command line needs."""


def outdated(library: str) -> str | None:
    """Return the needed and the installed version; None if `library` is new enough, missing or not in `OLDEST`."""
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    oldest = OLDEST.get(library, "0")
    return f"{library}>={oldest}, and this is {version}" if _numbers(version) < _numbers(oldest) else None


def install_command(library: str) -> str:
    """Return the command that installs a supported version of `library` and the libraries needed with it."""
    together = next((each for each in (OLDEST, COMMAND_LINE) if library in each), (library,))
    return " ".join(["pip install", *(f"'{name}>={OLDEST[name]}'" if name in OLDEST else name for name in together)])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3] if part.isdecimal()]
