"""Importing the package does not import triton, listened to in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "hf_lowprec"
ROOT = Path(__file__).resolve().parents[1]

# Runs before the code under test: prints the file of whoever asks for triton, whether it is installed or not.
# `importlib.util.find_spec("triton")` only asks whether it is there, and is no import.
LISTENER = """
import sys
class Listener:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            while "importlib" in file and "util" not in file:
                frame = frame.f_back
                file = frame.f_code.co_filename
            print("triton wanted by", file)
sys.meta_path.insert(0, Listener())
"""


def _who_imports_triton(code: str, directory: Path) -> list[str]:
    """The files under `directory` that import triton while `code` runs in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENER + code],
        env={**os.environ, "PYTHONPATH": str(directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = [line.removeprefix("triton wanted by ") for line in done.stdout.splitlines()]
    return [name for name in wanted if Path(name).is_relative_to(directory / PACKAGE)]


def test_importing_the_package_does_not_import_triton() -> None:
    assert _who_imports_triton(f"import {PACKAGE}", ROOT) == []


@pytest.mark.parametrize(
    ("statement", "is_import"),
    [
        ("import triton", True),
        ("import importlib; importlib.import_module('triton')", True),
        ("import importlib.util; importlib.util.find_spec('triton')", False),
    ],
)
def test_a_planted_import_of_triton_is_heard(tmp_path: Path, statement: str, is_import: bool) -> None:
    (tmp_path / PACKAGE).mkdir()
    planted = tmp_path / PACKAGE / "__init__.py"
    planted.write_text(f"try:\n    {statement}\nexcept ImportError:\n    pass\n")
    assert _who_imports_triton(f"import {PACKAGE}", tmp_path) == [str(planted)] * is_import
