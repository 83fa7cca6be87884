"""The page is well-formed, needs nothing from elsewhere, runs nothing, and shows what the files say as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from hf_lowprec.tools.plotting.figures import overview
from hf_lowprec.tools.plotting.html_page import html_page
from hf_lowprec.tools.plotting.measures import MEASURES
from hf_lowprec.tools.plotting.run_records import RunRecords
from hf_lowprec.tools.plotting.runs import Run
from tests.support.training.metrics_file import run_record, step_records

VOID = {"meta", "input", "link", "img", "br", "hr"}
EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"' &amp; \x00\x1b[31m \ud800 javascript:x"


@dataclass
class Html(HTMLParser):
    """Tags, attributes and text of a page. Raises an error for a tag that is closed twice, or never."""

    open_tags: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        assert len(attrs) == len(dict(attrs)), f"an attribute of <{tag}> is there twice"
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open_tags[-1] if self.open_tags else "", data))

    def text(self, *inside: str) -> str:
        return "".join(data for tag, data in self.texts if tag in inside or not inside)


def parsed(page: str) -> Html:
    html = Html()
    html.feed(page)
    html.close()
    assert html.open_tags == []
    return html


def run_of(mode: str, steps: int = 200, **record: Any) -> Run:
    return Run(f"{mode}-run", RunRecords(Path(mode), {**run_record(mode), **record}, step_records(mode, steps), []))


RUNS = [run_of("kahan"), run_of("nearest"), run_of("stochastic")]


def evil_run(name: str = EVIL) -> Run:
    """A run whose files contain markup in every place that holds text."""
    steps = step_records("nearest", 40, kinds=["attention"])
    for record in steps:
        record["findings"] = [EVIL]
        record["worst"] = {"lost_updates": [[EVIL, 0.5]], EVIL: [["x", 1.0]]}
        record["precision"][EVIL] = record["precision"]["all"]
    texts = dict.fromkeys(("model", "optim", "report"), EVIL)
    return Run(name, RunRecords(Path(EVIL), {**run_record("nearest"), **texts}, steps, [EVIL]))


@pytest.fixture(scope="module")
def page() -> str:
    return html_page(RUNS)


@pytest.fixture(scope="module")
def evil_page() -> str:
    return html_page([evil_run(), *RUNS[:1]])


@pytest.mark.parametrize("which", ["page", "evil_page"])
def test_nothing_is_loaded_and_nothing_runs(which: str, request: pytest.FixtureRequest) -> None:
    html = parsed(request.getfixturevalue(which))
    allowed = {"html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "footer"}
    allowed |= {"h1", "h2", "p", "div", "span", "fieldset", "legend", "label", "input", "figure", "figcaption"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"}
    allowed |= {"svg", "g", "path", "use", "defs", "clippath", "rect", "text"}
    assert {tag for tag, _ in html.tags} <= allowed
    assert sum(tag == "style" for tag, _ in html.tags) == 1  # those of figures would apply to the whole page
    policy = [a["content"] for tag, a in html.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    for _, attributes in html.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset", "xlink:href") for name in attributes)
        assert all(value.startswith("#") for name, value in attributes.items() if name == "href")
        assert all("url(#" in value for value in attributes.values() if "url(" in value)
        assert "//" not in "".join(v for name, v in attributes.items() if name != "aria-label")
    styles = html.text("style")
    assert not re.search(r"@import|url\(|//|<", styles)


def test_what_files_say_is_text(evil_page: str) -> None:
    html = parsed(evil_page)
    shown = EVIL.replace("\x00", "").replace("\x1b", "").replace("\ud800", "")
    for tag in ("title", "h1", "span", "p", "td", "pre", "div"):
        if tag not in ("h1", "title"):  # with several runs they name none
            assert shown in html.text(tag), tag
    alone = parsed(html_page([evil_run("<b>bold</b>")]))
    assert alone.text("h1") == "Training of <b>bold</b>"
    evil_page.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", evil_page)


def test_names_in_pictures_are_text_too(tmp_path: Path) -> None:
    for name in (EVIL, r"$\no_such_command$", "a\nb"):
        overview([evil_run(name)]).savefig(tmp_path / "plot.svg")
        assert b"<script" not in (tmp_path / "plot.svg").read_bytes()


def test_ids_are_unique_and_references_lead_to_them(page: str) -> None:
    html = parsed(page)
    ids = [attributes["id"] for _, attributes in html.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    attributes = [value for _, found in html.tags for value in found.values()]
    referred = {r for value in attributes for r in re.findall(r"url\(#([^)]+)\)|^#(\S+)$", value)}
    targets = {a or b for a, b in referred}
    assert targets and targets <= set(ids)
    for switch in re.findall(r"#(show-[\w-]+):not", html.text("style")):
        assert switch in ids


def test_switches_hide_runs_and_kinds_in_figures_and_tables(page: str) -> None:
    html = parsed(page)
    for k, run in enumerate(RUNS):
        assert f"body:has(#show-run-{k}:not(:checked)) .run-{k} {{ display: none; }}" in html.text("style")
        marked = [tag for tag, a in html.tags if f"run-{k}" in a.get("class", "").split()]
        drawn = [series for series in ("loss", "eval_loss", "grad_norm", "learning_rate") if run.logged(series)]
        measured = [(kind, m.name) for kind in run.kinds() for m in MEASURES if run.measured(kind, m.name)]
        bands = [name for _, name in measured if name.startswith("lost_")]
        assert marked.count("g") == len(drawn) + len(measured) + len(bands)
        assert marked.count("tr") >= 1 + len(run.kinds())
    for k, kind in enumerate(RUNS[0].kinds()):
        measures = [m for m in MEASURES if any(run.measured(kind, m.name) for run in RUNS)]
        assert sum(tag == "figure" and a.get("class") == f"kind-{k}" for tag, a in html.tags) == len(measures)
        rows = [a["class"].split() for tag, a in html.tags if tag == "tr" and f"kind-{k}" in a.get("class", "").split()]
        assert rows == [[f"run-{n}", f"kind-{k}"] for n, run in enumerate(RUNS)]
    inputs = [a for tag, a in html.tags if tag == "input"]
    assert len(inputs) == len(RUNS) + len(RUNS[0].kinds()) and all("checked" in a for a in inputs)


def test_colours_are_variables_for_both_themes(page: str) -> None:
    html = parsed(page)
    used = {name for _, a in html.tags for value in a.values() for name in re.findall(r"var\((--[\w-]+)\)", value)}
    light, dark = re.findall(r":root \{([^}]*)\}", html.text("style"))
    assert "prefers-color-scheme: dark" in html.text("style")
    for declared in (light, dark):
        assert used <= {name.strip() for name, _, _ in (part.partition(":") for part in declared.split(";"))}
    svg_styles = [a["style"] for tag, a in html.tags if tag in ("g", "path", "use", "text") and "style" in a]
    assert not any("#" in style.replace("url(#", "") for style in svg_styles)


def test_tables_end_with_the_last_numbers(page: str) -> None:
    cells = [text for tag, text in parsed(page).texts if tag == "td"]
    last = RUNS[1].records.steps[-1]
    assert f"{last['loss']:.4g}" in cells
    measured = last["precision"]["attention"]
    assert f"{measured['lost_updates']:.3f} ± 0.004" in cells
    assert "model.layers.3.self_attn.q_proj.weight" in cells


def test_findings_and_reports_are_there(page: str) -> None:
    html = parsed(page)
    assert "Use optim='adamw_bf16_kahan'. steps 20 to 200" in html.text("p", "span")
    assert html.text("pre").count("BF16 weights   0.26 M") == 3
    assert html.text("p").count("No findings.") == 2


def test_a_run_of_the_stock_trainer_is_a_page_too() -> None:
    steps = [{"step": k, "loss": 2.0 / k} for k in (1, 2, 3)]
    html = parsed(html_page([Run("plain", RunRecords(Path("plain"), {}, steps, []))]))
    assert sum(tag == "svg" for tag, _ in html.tags) == 1
    assert "Nothing was logged about precision" in html.text("p")
    assert not any(tag == "input" for tag, _ in html.tags)


def test_the_page_is_the_same_every_time(page: str) -> None:
    assert html_page(RUNS) == page
