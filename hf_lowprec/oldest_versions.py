"""The oldest transformers and accelerate that the integrations support; `pyproject.toml` says the same.

The core needs neither, and works with older versions installed.
"""

from __future__ import annotations

from importlib import metadata

OLDEST = {"transformers": "5.5.4", "accelerate": "1.11"}
COMMAND_LINE = ("typer", "rich", "packaging", "safetensors")
"""The libraries that the command line needs."""


def outdated(library: str) -> str | None:
    """The needed and the installed version, as text; None if `library` is new enough, missing or not in `OLDEST`."""
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    oldest = OLDEST.get(library, "0")
    return f"{library}>={oldest}, and this is {version}" if _numbers(version) < _numbers(oldest) else None


def install_command(library: str) -> str:
    """The command that installs `library` in a supported version, with those that are needed wherever it is."""
    together = next((each for each in (OLDEST, COMMAND_LINE) if library in each), (library,))
    return " ".join(["pip install", *(f"'{name}>={OLDEST[name]}'" if name in OLDEST else name for name in together)])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3] if part.isdecimal()]
