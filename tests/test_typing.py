"""Type checkers see the real types of all public names: in a user's script, in any kind of installation.

`mypy --strict` reads two scripts of `tests/support/typing`: one without mistakes, and one with a mistake per line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import hf_lowprec
from hf_lowprec.integrations.export.save_pretrained import ExportDtype, parse_dtype
from hf_lowprec.optim import ALGORITHMS
from hf_lowprec.optim.algorithms.muon import AdjustLr
from hf_lowprec.optim.arguments import Backend
from hf_lowprec.reduction.fsdp2 import Reduction, check_reduction
from hf_lowprec.reduction.grad_accumulation import GradAccumulation, check_grad_accumulation
from hf_lowprec.rounding import MODES, Rounding, StateRounding, mode_name

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "support" / "typing"
GOOD, WITH_MISTAKES = SCRIPTS / "good_script.py", SCRIPTS / "script_with_mistakes.py"

# Reading all of transformers would take another half a minute; nothing of it is in our signatures but base classes.
CONFIG = "[mypy]\n[mypy-transformers.*,accelerate.*]\nfollow_imports = skip\n"


def errors_of_mypy(folder: Path, cache: Path) -> dict[Path, dict[int, set[str]]]:
    """Run `mypy --strict` on the scripts; returns the codes of its errors by line."""
    (folder / "mypy.ini").write_text(CONFIG)
    options = ["--strict", "--no-error-summary", "--hide-error-context", f"--cache-dir={cache}"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, GOOD, WITH_MISTAKES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # as a .pth file of an editable install does
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    found: dict[Path, dict[int, set[str]]] = {GOOD: {}, WITH_MISTAKES: {}}
    for line in filter(None, result.stdout.splitlines()):
        match = re.fullmatch(r"(.+):(\d+): (?:error: .*\[([\w-]+)\]|note: .*)", line)
        assert match, result.stdout + result.stderr
        if match[3]:
            found[Path(match[1])].setdefault(int(match[2]), set()).add(match[3])
    return found


@pytest.mark.every_case
@pytest.mark.slow
def test_mypy_reports_every_mistake_and_nothing_else(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    lines = enumerate(WITH_MISTAKES.read_text(encoding="utf-8").splitlines(), 1)
    expected = {number: {line.rpartition("# error: ")[2]} for number, line in lines if "  # error: " in line}
    assert len(expected) > 10
    cache = pytestconfig.cache
    found = errors_of_mypy(tmp_path, cache.mkdir("mypy_of_scripts") if cache else tmp_path / "cache")
    assert found == {GOOD: {}, WITH_MISTAKES: expected}


def test_the_scripts_use_every_public_name() -> None:
    text = GOOD.read_text(encoding="utf-8") + WITH_MISTAKES.read_text(encoding="utf-8")
    assert [name for name in hf_lowprec.__all__ if not re.search(rf"\b{name}\b", text)] == []
    assert set(ALGORITHMS) < set(hf_lowprec.__all__)


def test_the_names_of_modes_are_those_of_the_code() -> None:
    assert {mode_name(name) for name in get_args(Rounding)} == set(MODES)
    assert set(MODES) < set(get_args(Rounding))


def adamw(**options: Any) -> None:
    hf_lowprec.AdamW([torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)], **options)


def muon(**options: Any) -> None:
    hf_lowprec.Muon([torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)], **options)


@pytest.mark.parametrize(
    ("keyword", "literal", "call"),
    [
        ("rounding", Rounding, adamw),
        ("state_rounding", StateRounding, adamw),
        ("backend", Backend, adamw),
        ("adjust_lr_fn", AdjustLr, muon),
        ("grad_accumulation", GradAccumulation, check_grad_accumulation),
        ("reduction", Reduction, check_reduction),
        ("dtype", ExportDtype, parse_dtype),
    ],
)
def test_the_values_of_a_literal_are_those_that_are_accepted(
    keyword: str, literal: Any, call: Callable[..., Any]
) -> None:
    for value in get_args(literal):
        with contextlib.suppress(RuntimeError):  # a backend that cannot run here
            call(**{keyword: value})
    with pytest.raises(ValueError, match=f"{keyword}='other'") as error:
        call(**{keyword: "other"})
    assert re.findall(r"'(\w+)'", str(error.value))[1:] == list(get_args(literal))


def test_an_editable_install_is_a_path_that_type_checkers_can_follow(tmp_path: Path) -> None:
    """setuptools chooses between a path and an import hook by the package's layout."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "hf_lowprec", tmp_path / "hf_lowprec", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools.build_meta import build_editable; build_editable('wheel')"
    (tmp_path / "wheel").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (installed,) = (name for name in archive.namelist() if ".dist-info/" not in name)
        assert installed.endswith(".pth")
        assert archive.read(installed).decode().strip() == str(tmp_path)
