"""Lets the benchmark run from a checkout that was not installed: a GPU machine may have no network to install from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Make `import hf_lowprec` give this checkout, and write the metadata that it reads its version from if need be."""
    sys.path.insert(0, str(ROOT))
    try:
        metadata.version("hf-lowprec")
    except metadata.PackageNotFoundError:
        found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
        version = found[1] if found else "0"
        site = tempfile.mkdtemp(prefix="hf_lowprec-metadata-")
        info = Path(site) / f"hf_lowprec-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-lowprec\nVersion: {version}\n")
        sys.path.append(site)


def commit() -> str:
    """The commit of this checkout and whether it was changed; of a copy without git, the environment's `COMMIT`."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")
