"""Hooks of `mkdocs.yml`: pages from outside docs/, links to such files, side bars, and the command-line reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing/index.md": "CONTRIBUTING.md"}
"""Pages of the site whose one copy lies in the repository's root."""

SECTIONS_ONLY = {"troubleshooting.md"}
"""Pages whose side bar lists their sections without what is in them."""

COMMAND_LINE = "<!-- hf-lowprec --help -->"
"""A line of this text in a page becomes the help of every command."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let one text work on GitHub and here: links that leave docs/, bars in tables; and write the commands' help."""
    markdown = relink(markdown, page.file.src_uri, config.repo_url)
    markdown = markdown.replace('src="docs/', 'src="')
    markdown = unescape_bars(markdown)
    if COMMAND_LINE in markdown:
        markdown = markdown.replace(COMMAND_LINE, command_line())
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Shorten the side bar of long pages."""
    if page.file.src_uri in SECTIONS_ONLY:
        for section in page.toc.items[0].children:
            section.children.clear()
    return html


def relink(markdown: str, uri: str, repo_url: str | None) -> str:
    """Rewrite the relative links of the page `uri`, so that one text works on GitHub and on the site.

    A link into docs/ stays one. A link to another file of the repository goes to `repo_url`; without one the file
    is named. A link to nothing stays as it is, for mkdocs to report.
    """
    source = ROOT / PAGES[uri] if uri in PAGES else DOCS / uri

    def replace(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups(default="")
        target = Path(os.path.normpath(source.parent / path))
        generated = next((page for page, file in PAGES.items() if ROOT / file == target), None)
        if generated is not None:
            target = DOCS / generated
        elif not target.exists():
            return match[0]
        if target.is_relative_to(DOCS):
            path = Path(os.path.relpath(target, (DOCS / uri).parent)).as_posix()
            return f"{image}[{text}]({path}{anchor})"
        if not target.is_relative_to(ROOT):
            return match[0]
        name = target.relative_to(ROOT).as_posix()
        if repo_url:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{name}{anchor})"
        return text if target.name in text else f"{text} (`{name}`)"

    return LINK.sub(replace, markdown)


def unescape_bars(markdown: str) -> str:
    """Take the backslash from bars in the code of tables, which GitHub needs and Python-Markdown shows."""

    def replace(row: re.Match[str]) -> str:
        return re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0])

    return re.sub(r"^\|.*\|$", replace, markdown, flags=re.MULTILINE)


@cache
def command_line() -> str:
    """The help of every command, as typer writes it."""
    typer = [sys.executable, "-m", "typer", "hf_lowprec.tools.cli", "utils", "docs", "--name", "hf-lowprec"]
    text = subprocess.run(typer, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout
    commands = text[text.index("\n## ") :]  # after a list of them whose texts are cut off
    return unescape(commands).replace("```console\n$ ", "```bash\n")
