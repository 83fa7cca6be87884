"""The page `docs/performance/evidence.md`, made from the records alone.

python -m benchmarks.evidence.page
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence import EXPERIMENTS, experiment
from benchmarks.evidence.harness import RESULTS, SIZES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "evidence.md"
_HEAD = """\
# Evidence

What was claimed, by others or here, and what was measured. Each part ends with the command that measures it again in a
checkout of the repository after `make .venv`; a command that was interrupted goes on where it was. `make evidence` runs
every experiment in a size that takes an hour on two cores. `python -m benchmarks.evidence.page` writes this page from
the records in [`benchmarks/results/evidence`](../../benchmarks/results/evidence). Settings, seeds and limits of
verdicts are fixed in the experiment's file before it runs.

Runs of a seed begin with equal weights and see equal data. A difference is the mean over seeds, with its 95% interval.
"equal": the interval lies within the limit. "worse" and "better": it lies beyond the limit. "undecided": neither. The
smallest visible difference is what such a comparison shows in four of five cases.
"""


class Row(NamedTuple):
    """A claim and what was measured.

    Attributes:
        claim: in words.
        ours: the measured figure.
        verdict: in a word.
        source: who claims it, and where; empty for claims of this project.
        published: the published figure.
    """

    claim: str
    ours: str
    verdict: str
    source: str = ""
    published: str = ""


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        title: its heading.
        text: what was done.
        rows: the claims.
        tables: further tables, in Markdown.
    """

    title: str
    text: str
    rows: list[Row]
    tables: list[str]


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = True) -> str:
    """A table; all columns but the first are aligned to the right, if they are `numbers`."""
    heads = list(heads)
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(found: Section, record: dict[str, Any]) -> str:
    """A part of the page in Markdown, with the command that runs the cases of `record` again."""
    columns = ("claim", "source", "published", "measured", "verdict")
    rows = [(row.claim, row.source, row.published, row.ours, row.verdict) for row in found.rows]
    kept = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    table = markdown_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], numbers=False)
    cases = record["cases"].values()
    hours = sum(case["seconds"] for case in cases) / 3600
    size = "" if record["size"] == SIZES[0] else f" --{record['size']}"
    machines = ", ".join(sorted({case["machine"]["cpu"] for case in cases}))
    command = (
        f"`python -m benchmarks.evidence {record['experiment']}{size} --output FOLDER`: {hours:.1f} hours of one core "
        f"({machines}). `--cases` runs some of: {', '.join(f'`{case}`' for case in record['cases'])}."
    )
    return "\n\n".join([f"## {found.title}", found.text, table, *found.tables, command])


def page() -> str:
    """The whole page."""
    parts = [_HEAD.rstrip()]
    for name in EXPERIMENTS:
        recorded = [path for size in SIZES if (path := RESULTS / f"{name}-{size}.json").exists()]
        if recorded:
            record: dict[str, Any] = json.loads(recorded[-1].read_text(encoding="utf-8"))
            parts.append(section(experiment(name).section(record), record))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
