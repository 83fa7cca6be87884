"""One HTML file with everything about some runs. It needs no network and has no scripts.

The page is built as a tree of elements, so whatever a file says is text. What can be shown and hidden are check boxes
that the style sheet reads.
"""

from __future__ import annotations

import io
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import matplotlib
from matplotlib.figure import Figure

from hf_lowprec.tools.plotting.colours import DARK, LIGHT, run_dash
from hf_lowprec.tools.plotting.figures import (
    Panel,
    kind_title,
    measure_panels,
    number_text,
    page_title,
    panel_figure,
    run_description,
    run_id,
    training_panels,
)
from hf_lowprec.tools.plotting.measures import MEASURES
from hf_lowprec.tools.plotting.runs import Run, Series, kinds_of_all

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Browsers load nothing and run nothing."""

_STYLE = """
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); --font: system-ui,
  -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main, header { max-width: 1240px; margin: 0 auto; padding: 0 16px; }
h1 { font-size: 24px; line-height: 1.25; margin: 24px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 0 0 10px; max-width: 110ch; }
.faint, figcaption, th, summary { color: var(--faint); }
nav { position: sticky; top: 0; z-index: 1; background: var(--page); border-bottom: 1px solid var(--grid); }
nav { max-height: 34vh; overflow-y: auto; }
nav > div { max-width: 1240px; margin: 0 auto; padding: 4px 16px; display: flex; flex-wrap: wrap; gap: 0 20px; }
nav fieldset { border: 0; margin: 0; padding: 0; min-width: 0; display: flex; flex-wrap: wrap; gap: 0 14px; }
nav label { display: inline-flex; align-items: center; gap: 6px; padding: 4px 0; cursor: pointer; min-width: 0;
  overflow-wrap: anywhere; }
nav input { margin: 0; width: 16px; height: 16px; flex: none; accent-color: var(--faint); }
legend { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.swatch { display: inline-block; flex: none; width: 22px; height: 0; border-top: 3px solid; vertical-align: middle; }
.wide { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: 12px 24px; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 8px 16px; }
figure { margin: 0; }
figcaption { display: flex; justify-content: space-between; gap: 6px; color: var(--ink); font-size: 14px; }
figcaption span { font-size: 12.5px; font-variant-numeric: tabular-nums; }
.last { display: flex; gap: 7px; }
svg text { font-family: var(--font) !important; }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { width: max-content; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 5px 18px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { font-weight: normal; vertical-align: bottom; }
.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; max-width: 26em; }
td .swatch { margin-right: 8px; }
.finding { display: grid; grid-template-columns: minmax(0, 220px) minmax(0, 1fr); gap: 0 24px; padding: 6px 0;
  overflow-wrap: anywhere; border-bottom: 1px solid var(--grid); }
.finding > :only-child { grid-column: 1 / -1; }
.finding p { margin: 0 0 6px; max-width: none; }
.finding .swatch { margin-right: 8px; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.45; margin: 8px 0; padding: 12px; background: var(--grid);
  border-radius: 6px; }
summary { cursor: pointer; padding: 4px 0; overflow-wrap: anywhere; }
footer { margin: 40px 0 24px; font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 480px) { .small { grid-template-columns: 1fr 1fr; } nav { position: static; max-height: none; }
  .finding { grid-template-columns: minmax(0, 1fr); } }
@media print { nav { display: none; } section { break-inside: avoid; } }
"""


def html_page(runs: Sequence[Run]) -> str:
    """The text of the page."""
    kinds = kinds_of_all(runs)
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", name="color-scheme", content="light dark")
    _text(head, "title", page_title(runs))
    _text(head, "style", _style_sheet(len(runs), len(kinds)))
    body = SubElement(html, "body")
    header = SubElement(body, "header")
    _text(header, "h1", page_title(runs))
    if len(runs) == 1:
        _text(header, "p", run_description(runs[0]), "faint")
    _add_switches(body, runs, kinds)
    main = SubElement(body, "main")
    _add_findings(main, runs)
    _add_panels(_section(main, "Training"), training_panels(runs), runs, kinds, "training", "wide")
    for measure in MEASURES:
        if panels := measure_panels(measure, runs):
            section = _section(main, measure.title, measure.meaning)
            _add_panels(section, panels, runs, kinds, measure.name, "small")
    _add_final_numbers(main, runs)
    _add_final_precision(main, runs, kinds)
    _add_worst_tensors(main, runs)
    _add_reports(main, runs)
    footer = SubElement(main, "footer", {"class": "faint"})
    for run in runs:
        _text(footer, "div", f"{run.name}: {run.records.source}")
    ElementTree.indent(head)
    return "<!DOCTYPE html>\n" + ElementTree.tostring(html, encoding="unicode", method="html") + "\n"


def _style_sheet(runs: int, kinds: int) -> str:
    light, dark = (
        f":root {{ {' '.join(f'{name}: {colour};' for name, colour in theme.variables().items())} }}"
        for theme in (LIGHT, DARK)
    )
    switches = [f"run-{k}" for k in range(runs)] + [f"kind-{k}" for k in range(kinds)]
    hidden = [f"body:has(#show-{name}:not(:checked)) .{name} {{ display: none; }}" for name in switches]
    return "\n".join([light, f"@media (prefers-color-scheme: dark) {{ {dark} }}", _STYLE.strip(), *hidden])


def _add_switches(body: Element, runs: Sequence[Run], kinds: Sequence[str]) -> None:
    """Check boxes for runs and kinds, as far as there is a choice."""
    groups = [
        ("Runs", "run", [run.name for run in runs]),
        ("Parts of the model", "kind", [kind_title(kind) for kind in kinds]),
    ]
    groups = [group for group in groups if len(group[2]) > 1]
    if not groups:
        return
    bar = SubElement(SubElement(body, "nav"), "div")
    for title, prefix, names in groups:
        fieldset = SubElement(bar, "fieldset")
        _text(fieldset, "legend", title)
        for k, name in enumerate(names):
            label = SubElement(fieldset, "label")
            SubElement(label, "input", type="checkbox", id=f"show-{prefix}-{k}", checked="checked")
            if prefix == "run":
                _add_swatch(label, k)
            _text(label, "span", name)


def _add_findings(main: Element, runs: Sequence[Run]) -> None:
    """Sentences of the log, and what is missing in it."""
    section = _section(main, "Findings")
    for k, run in enumerate(runs):
        block = SubElement(section, "div", {"class": f"finding run-{k}"})
        if len(runs) > 1:
            _add_swatch(name := SubElement(block, "div"), k)
            _text(name, "span", run.name)
        texts = SubElement(block, "div")
        for finding in run.findings():
            paragraph = _text(texts, "p", f"{finding.message} ")
            _text(paragraph, "span", _when(finding.first_step, finding.last_step), "faint")
        for note in run.notes() or ([] if run.findings() else ["No findings."]):
            _text(texts, "p", note, "faint")


def _when(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _add_panels(
    section: Element, panels: Sequence[Panel], runs: Sequence[Run], kinds: Sequence[str], name: str, layout: str
) -> None:
    grid = SubElement(section, "div", {"class": layout})
    names = {run_id(k): _plain(run.name) for k, run in enumerate(runs)}
    for number, panel in enumerate(panels):
        hidden_with = f"kind-{kinds.index(panel.kind)}" if layout == "small" else ""
        figure = SubElement(grid, "figure", {"class": hidden_with} if hidden_with else {})
        caption = SubElement(figure, "figcaption")
        _text(caption, "span", panel.title)
        label = _plain(f"{name.replace('_', ' ')}, {panel.title}, over optimizer steps")
        drawn = panel_figure(panel, runs)
        figure.append(inline_svg(drawn, f"{name}-{number}", label, LIGHT.variables(), names))


def _add_final_numbers(main: Element, runs: Sequence[Run]) -> None:
    columns = {
        "loss": "loss",
        "evaluation loss": "eval_loss",
        "gradient norm": "grad_norm",
        "learning rate": "learning_rate",
    }
    columns = {title: key for title, key in columns.items() if any(run.logged(key) for run in runs)}
    section = _section(main, "Final numbers", "The last values that each run logged.")
    about = {title: key for title, key in (("model", "model"), ("optimizer", "optim"))
             if any(run.records.run.get(key) for run in runs)}  # fmt: skip
    rows: list[_Row] = []
    for k, run in enumerate(runs):
        texts = [str(run.records.run.get(key, "")) for key in about.values()]
        numbers = [_last_text(run.logged(key)) for key in columns.values()]
        rows.append(_Row(k, [run.name, *texts, str(run.last_step), *numbers]))
    _add_table(section, ["run", *about, "steps", *columns], rows, text_columns=1 + len(about))


def _add_final_precision(main: Element, runs: Sequence[Run], kinds: Sequence[str]) -> None:
    if not kinds:
        return
    measures = [m for m in MEASURES if any(run.measured(kind, m.name) for run in runs for kind in kinds)]
    section = _section(main, "Precision at the end", "The last measurements, ± one standard error.")
    rows: list[_Row] = []
    for number, kind in enumerate(kinds):
        for k, run in enumerate(runs):
            numbers = [_last_text(run.measured(kind, measure.name)) for measure in measures]
            if any(numbers):
                rows.append(_Row(k, [kind_title(kind), run.name, *numbers], f"kind-{number}"))
    _add_table(section, ["part of the model", "run", *(m.title.lower() for m in measures)], rows, text_columns=2)


def _add_worst_tensors(main: Element, runs: Sequence[Run]) -> None:
    titles = {measure.name: measure.title for measure in MEASURES}
    rows = [
        _Row(k, [titles.get(name, name).lower(), tensor, run.name, number_text(value)])
        for k, run in enumerate(runs)
        for name, tensors in run.worst_tensors().items()
        for tensor, value in tensors
    ]
    if rows:
        section = _section(main, "Worst tensors", "At the last measurement.")
        _add_table(section, ["measure", "tensor", "run", "value"], rows, text_columns=3)


def _add_reports(main: Element, runs: Sequence[Run]) -> None:
    """The precision reports, folded away."""
    reports = [(k, run, run.records.run["report"]) for k, run in enumerate(runs) if run.records.run.get("report")]
    if not reports:
        return
    section = _section(main, "Precision report", "What was printed when training began.")
    for k, run, report in reports:
        details = SubElement(section, "details", {"class": f"run-{k}"})
        if len(runs) == 1:
            details.set("open", "open")
        _text(details, "summary", run.name)
        _text(details, "pre", str(report))


@dataclass(frozen=True)
class _Row:
    """Of a table: the number of the run that it is about, its cells, and the class by which it is hidden."""

    run: int
    cells: list[str]
    hidden_with: str = ""


def _add_table(parent: Element, titles: Sequence[str], rows: Iterable[_Row], text_columns: int) -> None:
    """A table that scrolls by itself, with text in its first columns and numbers in the others."""
    table = SubElement(SubElement(parent, "div", {"class": "scroll", "tabindex": "0"}), "table")
    heads = SubElement(SubElement(table, "thead"), "tr")
    for k, title in enumerate(titles):
        _text(heads, "th", title, "text" if k < text_columns else "")
    body = SubElement(table, "tbody")
    for row in rows:
        cells = SubElement(body, "tr", {"class": f"run-{row.run} {row.hidden_with}".strip()})
        for k, cell in enumerate(row.cells):
            data = _text(cells, "td", cell, "text" if k < text_columns else "")
            if titles[k] == "run":
                _add_swatch(data, row.run)
                data[-1].tail, data.text = data.text, ""


def _add_swatch(parent: Element, run: int) -> None:
    style = f"border-top-color: var(--run-{run % len(LIGHT.runs)}); border-top-style: {run_dash(run)}"
    SubElement(parent, "span", {"class": "swatch", "style": style})


def _section(main: Element, title: str, meaning: str = "") -> Element:
    section = SubElement(main, "section")
    _text(section, "h2", title)
    if meaning:
        _text(section, "p", meaning, "faint")
    return section


def _last_text(series: Series) -> str:
    """The last value; with an error, to the error's first digit."""
    value, error = series.last
    if not math.isfinite(value):
        return ""
    if not (math.isfinite(error) and error > 0):
        return number_text(value)
    digits = max(0, -math.floor(math.log10(error)))
    return f"{round(value, digits) + 0.0:.{digits}f} ± {error:.{digits}f}".replace("-", "−")  # + 0.0: not −0.00


def _text(parent: Element, tag: str, text: str, style: str = "") -> Element:
    child = SubElement(parent, tag, {"class": style} if style else {})
    child.text = text if tag == "style" else _plain(text)
    return child


def _plain(text: str) -> str:
    """Text without control characters, which HTML does not allow."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs"))


_REFERENCE = re.compile(r"(?<=url\(#)[^)]+(?=\))|(?<=^#)[\w-]+$")
"""The id that a value of an attribute refers to."""
_LONG_DECIMALS = re.compile(r"(\.\d\d)\d+")


def inline_svg(
    figure: Figure, name: str, description: str, variables: Mapping[str, str], titles: Mapping[str, str]
) -> Element:
    """Convert a figure.

    Args:
        figure: any.
        name: distinguishes the ids of this figure from those of others in the page.
        description: for those who cannot see it.
        variables: the colour of each CSS variable. Where the figure uses that colour, the SVG uses the variable.
        titles: for artists whose id (`set_gid`) is a key: the text that appears when the mouse points at them. Their
            id becomes a class, since it may occur in many figures.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    colours = {colour: f"var({variable})" for variable, colour in variables.items()}
    referred = {found[0] for element in root.iter() for value in element.attrib.values()
                if (found := _REFERENCE.search(value))}  # fmt: skip
    for element in list(root.iter()):
        for child in [child for child in element if child.tag.endswith(("}metadata", "}style"))]:
            element.remove(child)  # the latter would apply to the whole page
        element.tag = element.tag.partition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        group = attributes.pop("id", "")
        if group in referred:
            element.set("id", f"{name}-{group}")
        elif group in titles:
            element.set("class", group)
            element.insert(0, title := Element("title"))
            title.text = titles[group]
        for key, value in attributes.items():
            value = re.sub(r"#[0-9a-f]{6}\b", lambda colour: colours.get(colour[0], colour[0]), value)
            value = _REFERENCE.sub(rf"{name}-\g<0>", value)
            element.set(key, _LONG_DECIMALS.sub(r"\1", value))
        element.tail = None
        if element.tag not in ("text", "tspan", "title"):
            element.text = None
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": description}
    return root
