"""Importing the package does not import triton, listened to in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import forkserver

PACKAGE = "hf_lowprec"
ROOT = Path(__file__).resolve().parents[1]

# Runs before the import, in a process that has imported torch already: forgets the package, and prints the file of
# whoever asks for triton, whether it is installed or not.
# `importlib.util.find_spec("triton")` only asks whether it is there, and is no import.
LISTENER = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("hf_lowprec", "triton")]:
    del sys.modules[name]
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


def _who_imports_triton(directory: Path, folder: Path) -> list[str]:
    """The files under `directory` that import triton while the package in it is imported."""
    script = folder / "listen.py"
    script.write_text(f"{LISTENER}sys.path.insert(0, {str(directory)!r})\nimport {PACKAGE}\n")
    done = forkserver.run(script, [], timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = [line.removeprefix("triton wanted by ") for line in done.stdout.splitlines()]
    return [name for name in wanted if Path(name).is_relative_to(directory / PACKAGE)]


def test_importing_the_package_does_not_import_triton(tmp_path: Path) -> None:
    assert _who_imports_triton(ROOT, tmp_path) == []


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
    assert _who_imports_triton(tmp_path, tmp_path) == [str(planted)] * is_import
