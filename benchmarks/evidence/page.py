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
from benchmarks.evidence.statistics import LIMIT, Paired, verdict
from benchmarks.evidence.training.replicas import Shape

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance" / "evidence.md"
_HEAD = """\
# Evidence

Claims by others and by this project, each beside a measurement. Every part ends with the command that measures it
again, in a checkout of the repository after `make .venv`. It runs the experiment, keeps its records in FOLDER, and
prints the part made from them. If you interrupt it, run it again with the same FOLDER: cases that are done are kept,
and a long case goes on from its last checkpoint, written every two minutes.

`--cases` measures a part, and what it is compared with.

There are three sizes. Without `--night` or `--full`, the same experiment is smaller: all of them together, which is
`make evidence`, take 42 minutes on two cores. The page shows the largest size that was recorded.

`python -m benchmarks.evidence.page` writes this page from the records in
[`benchmarks/results/evidence`](../../benchmarks/results/evidence). Settings, seeds and limits of verdicts are fixed in
[the experiment's file](../../benchmarks/evidence/experiments) before it runs.

**What is compared.** The runs of a seed begin with the same FP32 weights and see the same data; seeds count from 0.
BF16 modes round these weights; split and Kahan summation keep what is rounded off. Stochastic rounding has error
feedback, unless the row says "without". "Rounding to nearest" is plain
`model.to(bfloat16)` with torch's optimizer, norms included; all others keep norms in FP32. States are in BF16, unless
said otherwise. Losses are those of text that is held out, in nats per byte; differences are from FP32.

**Verdicts.** A difference is the mean over seeds, with its 95% interval; one interval in twenty misses the true value.
The first of these that is true: "equal": the interval lies within ±{LIMIT}, unless another limit is named. "worse" or
"better": it lies beyond the limit. "above" or "below": it lies on one side of zero. "undecided". "visible" is the
smallest difference that such a comparison tells from zero in four of five cases.
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


def all_equal(claim: str, pairs: Sequence[Paired], kind: str, limit: float = LIMIT) -> Row:
    """The row of a claim that several comparisons test, one for each of a `kind` of things (a plural)."""
    equal = sum(verdict(found, limit) == "equal" for found in pairs)
    reach = max(abs(found.mean) + found.half for found in pairs)
    measured = f"intervals reach {reach:.4f}; visible: {max(found.visible for found in pairs):.4f}"
    return Row(claim, measured, f"equal at {equal} of {len(pairs)} {kind}")


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
    """A part of the page in Markdown, with the command that runs the cases of `record` again."""
    found, example = experiment.section(record), experiment.example
    columns = ("claim", "source", "published", "measured", "verdict")
    rows = [(row.claim, row.source, row.published, row.ours, row.verdict) for row in found.rows]
    kept = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    table = markdown_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], numbers=False)
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
    return "\n\n".join([f"## {found.title}", found.text, table, *found.tables, command])


def page() -> str:
    """The whole page."""
    parts = [_HEAD.rstrip().format(LIMIT=LIMIT)]
    for name in EXPERIMENTS:
        recorded = [path for size in SIZES if (path := RESULTS / f"{name}-{size}.json").exists()]
        if recorded:
            record: dict[str, Any] = json.loads(recorded[-1].read_text(encoding="utf-8"))
            parts.append(section(experiment(name), record))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
