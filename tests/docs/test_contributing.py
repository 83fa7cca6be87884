"""The pages for contributors name files and classes that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = ROOT / "docs" / "contributing"
SOURCES = sorted([*(ROOT / "hf_lowprec").rglob("*.py"), *ROOT.glob("*.py")])
FILE = re.compile(r"(?:[\w-]+/)*\w+\.py\b")
CLASS = re.compile(r"`([A-Z]\w+)`")


def missing_files(text: str) -> list[str]:
    """The Python files that a text names, by path or by the end of one, and that are not in this repository."""
    others = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    paths = [f"/{path.relative_to(ROOT)}" for path in (*SOURCES, *others)]
    return [name for name in FILE.findall(text) if not any(path.endswith(f"/{name}") for path in paths)]


def defined_names() -> set[str]:
    """The classes and module-level names of the package."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


@pytest.mark.parametrize("page", sorted(CONTRIBUTING.glob("*.md")), ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert FILE.findall(text)
    assert missing_files(text) == []


def test_classes_that_the_architecture_page_names_exist() -> None:
    named = set(CLASS.findall((CONTRIBUTING / "architecture.md").read_text(encoding="utf-8"))) - {"Trainer"}
    assert named > {"KernelSpec", "StepPlan"}
    defined = defined_names()
    assert [name for name in named if name not in defined] == []
