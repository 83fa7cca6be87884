"""The documentation: it builds without a warning, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from filelock import FileLock

import hf_lowprec
from hf_lowprec.tools.cli import app
from tests.support.docs.pages import DOCS, ROOT, blocks, pages, prose
from tools.site_hooks import relink

COMMANDS = typer.main.get_command(app)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly, once for all workers of pytest-xdist."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, log = shared / "site", shared / "site.log"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": "", "REPO_URL": ""}
            done = subprocess.run(  # noqa: PLW1510  (the log is what is checked)
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
            )
            log.write_text(f"{done.returncode}\n{done.stdout}")
    code, _, output = log.read_text().partition("\n")
    assert code == "0", output
    return folder


@dataclass
class Html(HTMLParser):
    """The references of a built page, and the anchors in it."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found.get("href", ""))
        elif "src" in found:
            self.loaded.append(found["src"])


@pytest.fixture(scope="session")
def built(site: Path) -> dict[Path, Html]:
    """Every page of the built site."""
    parsed = {}
    for path in site.rglob("*.html"):
        parsed[path] = Html()
        parsed[path].feed(path.read_text(encoding="utf-8"))
    assert len(parsed) > 30
    return parsed


def test_links_and_anchors_of_the_site_resolve(site: Path, built: dict[Path, Html]) -> None:
    """Those that mkdocs does not see as well: in the navigation, and to what docstrings define."""
    broken = []
    for page, html in built.items():
        if page.name == "404.html":  # shown at any address, so its links begin at the site's
            continue
        for link in [*html.links, *html.loaded]:
            url = urlsplit(link)
            if url.scheme or url.netloc or not link:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            if target.is_dir():
                target = target / "index.html"
            known = target.exists()
            if known and url.fragment and target.suffix == ".html":
                known = unquote(url.fragment) in built[target].ids
            if not known:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_the_site_loads_nothing_from_elsewhere(built: dict[Path, Html]) -> None:
    assert {link for html in built.values() for link in html.loaded if urlsplit(link).netloc} == set()


def test_every_public_name_has_its_place_in_the_reference(site: Path, built: dict[Path, Html]) -> None:
    described = set().union(*(html.ids for path, html in built.items() if path.is_relative_to(site / "reference")))
    assert [name for name in hf_lowprec.__all__ if f"hf_lowprec.{name}" not in described] == []


@pytest.mark.parametrize(
    ("words", "page", "field"),
    [
        ("OOM", "troubleshooting/", "title"),
        ("CUDA out of memory", "troubleshooting/", "title"),
        ("NaN", "troubleshooting/", "title"),
        ("loss does not go down", "troubleshooting/", "title"),
        ("Muon", "choosing/", "title"),
        ("LoRA", "guides/adapters/", "title"),
        ("FSDP", "guides/distributed/", "title"),
        ("resume", "guides/saving/", "title"),
        ("8B", "guides/8b-on-one-gpu/", "title"),
        ("BF16 vs FP32", "performance/evidence/", "title"),
        ("Colab", "quickstart/", "text"),
    ],
)
def test_the_search_knows_the_words_of_a_reader(site: Path, words: str, page: str, field: str) -> None:
    """It finds words that begin with those typed, and ranks by headings first."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    parts = [part[field].lower() for part in index["docs"] if part["location"].partition("#")[0] == page]
    indexed = [re.split(index["config"]["separator"], part) for part in parts]
    typed = words.lower().split()
    assert any(all(any(term.startswith(word) for term in terms) for word in typed) for terms in indexed)


class TestPages:
    def test_python_compiles(self) -> None:
        for page in pages():
            for block in blocks(page):
                if block.language in ("python", "py"):
                    compile("\n" * block.line + block.text, str(page), "exec")

    @pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
    def test_commands_and_their_options_exist(self, page: Path) -> None:
        for line in command_lines(page):
            check_command(line)

    def test_optimizer_names_exist(self) -> None:
        named = {name for page in pages() for name in re.findall(r"\b[a-z]+_bf16_[a-z]+\b", page.read_text("utf-8"))}
        assert named - {*hf_lowprec.OPTIMIZER_NAMES} == set()

    def test_links_work_on_github(self) -> None:
        """Relative ones lead to a file of the repository, others to an address that can be one."""
        on_site_alone = [DOCS / "changelog.md", DOCS / "contributing" / "index.md"]
        for page in pages():
            for link in re.findall(r"\]\(<?([^()\s>]+)>?(?: [^()]*)?\)", prose(page)):
                url = urlsplit(link)
                if url.scheme:
                    valid = url.scheme in ("https", "mailto") and re.fullmatch(r"[\w-]+(\.[\w-]+)+", url.netloc)
                    assert valid, (page, link)
                elif url.path:
                    target = Path(os.path.normpath(page.parent / url.path))
                    assert target.exists() or target in on_site_alone, (page, link)


def command_lines(page: Path) -> list[list[str]]:
    """The words after `hf-lowprec`, `python -m hf_lowprec` or a launcher's `-m hf_lowprec`, from shell blocks."""
    found = []
    for block in blocks(page):
        if block.language not in ("bash", "sh", "shell", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hf-lowprec"]:
                found.append(words[1:])
            elif "hf_lowprec" in words and words[words.index("hf_lowprec") - 1] == "-m":
                found.append(words[words.index("hf_lowprec") + 1 :])
    return found


def check_command(words: list[str]) -> None:
    """Parse as the command line would, without running anything."""
    name, *arguments = words
    assert name in COMMANDS.commands, f"hf-lowprec has no command {name!r}"
    COMMANDS.commands[name].make_context(name, arguments)


@pytest.mark.parametrize(
    "line", ["hf-lowprec estimat x", "hf-lowprec estimate x --gpu 8", "python -m hf_lowprec estimate x --gpus many"]
)
def test_a_planted_command_is_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"- in a list\n\n    ```bash\n    {line}\n    ```\n")
    (words,) = command_lines(page)
    with pytest.raises(Exception, match=r"no command|No such option|valid integer"):
        check_command(words)


class TestLinksToFilesOutsideOfDocs:
    URL = "https://example.org/repo"

    @pytest.mark.parametrize(
        ("uri", "written", "on_the_site", "without_an_address"),
        [
            (
                "guides/trl.md",
                "[a](../../examples/dpo.py)",
                f"[a]({URL}/blob/main/examples/dpo.py)",
                "a (`examples/dpo.py`)",
            ),
            ("quickstart.md", "[`LICENSE`](../LICENSE)", f"[`LICENSE`]({URL}/blob/main/LICENSE)", "`LICENSE`"),
            ("guides/trl.md", "[a](../../CHANGELOG.md#added)", *["[a](../changelog.md#added)"] * 2),
            ("changelog.md", "[a](docs/model-support.md)", *["[a](model-support.md)"] * 2),
            ("quickstart.md", "[a](not-there.md)", *["[a](not-there.md)"] * 2),
        ],
    )
    def test_they_are_rewritten(self, uri: str, written: str, on_the_site: str, without_an_address: str) -> None:
        assert relink(written, uri, self.URL) == on_the_site
        assert relink(written, uri, None) == without_an_address


def test_bars_in_the_code_of_tables_have_no_backslash(site: Path) -> None:
    cells = [cell for page in site.rglob("*.html") for cell in re.findall(r"<td[^>]*>.*?</td>", page.read_text())]
    code = [code for cell in cells for code in re.findall(r"<code>(.*?)</code>", cell)]
    assert "keep_fp32=lm_head|*.gate" in code
    assert [text for text in code if r"\|" in text] == []
