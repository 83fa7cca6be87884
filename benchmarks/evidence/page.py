"""The page `docs/performance/evidence.md`, made from the records alone.

python -m benchmarks.evidence.page
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence import EXPERIMENTS, experiment
from benchmarks.evidence.harness import RESULTS, SIZES, Experiment
from benchmarks.evidence.statistics import CONFIDENCE, LIMIT, PRIMARY, Paired, verdict
from benchmarks.evidence.training.replicas import Shape

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "evidence.md"
_HEAD = """\
# Evidence

How far training in 16 bits ends from training in FP32, and what others claim, each beside a measurement. Every answer
is made from a record; details and the command that measures it again are folded below it.

{summary}

## How to read it

**What is compared.** Runs of a seed begin with the same FP32 weights and see the same data. A difference is from FP32,
in nats per byte of text that is held out, as the mean over seeds with its 95% interval. BF16 modes round the first
weights; split and Kahan summation keep what is rounded off. Stochastic rounding has error feedback, unless the row says
"without". "Rounded to nearest" is `model.to(bfloat16)` with torch's optimizer; all other modes keep norms in FP32.

**Verdicts.** Each row gets the first verdict that applies. "Equal": the interval lies within ±{LIMIT}, unless another
limit is named; "above zero" or "below zero" is added if it excludes zero. "Worse" or "better": it lies beyond the
limit. "Above" or "below": it lies on one side of zero. Otherwise "undecided". The limit of {LIMIT} is half of the one
that was chosen with the first results; it was lowered when most results were known. Other limits were fixed before
their experiments ran.

**Many claims.** {PRIMARY} claims are primary: split weights and stochastic rounding each end where FP32 does in
[long runs](#steps), split weights do so in fine-tuning of a pretrained model, and rounding to
nearest does not. Their intervals hold together with 95%, so each has {CONFIDENCE:.2%}. All others are exploratory: one
in twenty misses the true value.

**Measure again.** In a checkout after `make .venv`, each command runs its experiment, keeps its records in FOLDER, and
prints its part of this page. If you interrupt it, run it again with the same FOLDER, and it goes on where it was.
Without `--night` or `--full`, the experiment is smaller: all of them together, which is `make evidence`, take an hour
on two cores. `--cases` runs a part of it. Settings and seeds are in [the experiment's
file](../../benchmarks/evidence/experiments), records in
[`benchmarks/results/evidence`](../../benchmarks/results/evidence). `python -m benchmarks.evidence.page` writes this
page.
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
        tables: further tables, in Markdown; they are folded.
        question: what is asked.
        answer: in words, with the decisive figures.
        model: the largest model, in words.
        figure: name of a picture in `docs/images` and what it shows; empty if there is none.
        table: a table that is not folded.
    """

    title: str
    text: str
    rows: list[Row]
    tables: list[str]
    question: str = ""
    answer: str = ""
    model: str = ""
    figure: tuple[str, str] = ("", "")
    table: str = ""

    @property
    def link(self) -> str:
        """To its heading."""
        return f"#{self.title.lower().replace(' ', '-')}"


def all_equal(claim: str, pairs: Sequence[Paired], kind: str, limit: float = LIMIT) -> Row:
    """The row of a claim that several comparisons test, one for each of a `kind` of things (a plural)."""
    equal = sum(verdict(found, limit).startswith("equal") for found in pairs)
    reach = max(abs(found.mean) + found.half for found in pairs)
    return Row(claim, f"intervals reach {reach:.4f}", f"equal at {equal} of {len(pairs)} {kind}")


def describe(settings: dict[str, Any]) -> str:
    """The model, seeds and batches of an experiment with `Replicas`."""
    shape = Shape(**settings["shape"])
    return (
        f"A transformer over bytes with {shape.parameters():,} parameters ({shape.layers} layers, width "
        f"{shape.width}), {settings['seeds']} seeds, {settings['sequences']} × {shape.length} bytes of Python's "
        "standard library per step."
    )


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = True) -> str:
    """A table; all columns but the first are aligned to the right, if they are `numbers`."""
    heads = list(heads)
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(experiment: Experiment, record: dict[str, Any]) -> str:
    """A part of the page in Markdown: the answer, and folded, all tables and the command that measures it again."""
    found, example = experiment.section(record), experiment.example
    columns = ("claim", "source", "published", "measured", "verdict")
    rows = [(row.claim, row.source, row.published, row.ours, row.verdict) for row in found.rows]
    kept = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    claims = markdown_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], numbers=False)
    cases = record["cases"].values()
    hours = sum(case["seconds"] for case in cases) / 3600
    size = "" if record["size"] == SIZES[0] else f" --{record['size']}"
    size += f" --device {record['device']}" if "device" in record else ""
    machines = {
        f"{machine.get('gpu', machine['cpu'])}, Python {machine['python']}, torch {machine['torch']}"
        for machine in (case["machine"] for case in cases)
    }
    texts = {case["text"] for case in cases if "text" in case}
    command = (
        f"`.venv/bin/python -m benchmarks.evidence {record['experiment']}{size} --output FOLDER` took {hours:.1f} "
        f"hours of one process ({'; '.join(sorted(machines))}{''.join(f'; text {text}' for text in sorted(texts))}); "
        f'a part: `--cases "{example}"`.'
    )
    name, shown = found.figure
    pictures = [f"![{shown}](../images/{name}{end})" for end in (".svg#only-light", "-dark.svg#only-dark") if name]
    open_parts = [f"**{found.question}** {found.answer}" * bool(found.question), *pictures, found.table]
    # Folded if the answer is in another table.
    open_parts.append(claims * bool(rows) * (not found.table))
    folded = [found.text, claims * bool(rows and found.table), *found.tables, command]
    return "\n\n".join([
        f"## {found.title}",
        *filter(None, open_parts),
        '<details markdown="1"><summary>What was done, and all figures</summary>',
        *filter(None, folded),
        "</details>",
    ])  # fmt: skip


def page() -> str:
    """The whole page."""
    parts, summary = list[str](), list[list[str]]()
    for name in EXPERIMENTS:
        recorded = [path for size in SIZES if (path := RESULTS / f"{name}-{size}.json").exists()]
        if recorded:
            record: dict[str, Any] = json.loads(recorded[-1].read_text(encoding="utf-8"))
            parts.append(section(experiment(name), record))
            found = experiment(name).section(record)
            summary.append([f"[{found.question}]({found.link})", found.answer, found.model])
    table = markdown_table(("question", "answer", "largest model"), summary, numbers=False)
    confidence = 1 - (1 - CONFIDENCE) / PRIMARY
    head = _HEAD.rstrip().format(LIMIT=LIMIT, PRIMARY={4: "Four"}[PRIMARY], CONFIDENCE=confidence, summary=table)
    return "\n\n".join([head, *parts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
