"""Read the pages of the documentation: their code blocks and their prose."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
INLINE_CODE = re.compile(r"`+[^`]*`+")


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    text: str
    line: int
    """The line of the page on which the fence opens."""


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, CHANGELOG.md and every page of docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order, without the indentation of the list that they stand in."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"], textwrap.dedent(match["text"]), text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its code."""
    return INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
