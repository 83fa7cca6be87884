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
# Evidence: BF16 vs FP32

This page compares the final loss of 16-bit training with FP32's, and tests published claims. Every answer is generated
from saved results. A section's setup gives the command that repeats its measurements. If the name of an experiment
follows a question, `.venv/bin/python -m benchmarks.evidence NAME` prints its tables.

{summary}

**Primary claims.** We chose the three claims about long runs after seeing their results, and the claim about [a
pretrained model](#a-pretrained-model) before seeing its result. Each interval has a confidence level of
{CONFIDENCE:.2%}, so all four claims hold together with 95% confidence (Bonferroni):

{primary}

All other comparisons are exploratory: expect about 1 in 20 of their intervals to miss the true value.

**Published claims.** These measurements confirm {confirmed} published claims, but not the following. Here, "no" and
"undecided" say whether the published claim is confirmed:

{refuted}

## How to read it

| name on this page | optimizer | what is stored for each weight |
| --- | --- | --- |
| split | `adamw_bf16_split` | 16 bits that the model computes with, and the other 16 bits of FP32 |
| Kahan | `adamw_bf16_kahan` | a BF16 weight, and its rounding error in BF16 |
| stochastic | `adamw_bf16_sr` | a BF16 weight; the momentum gives back the rounding error |
| stochastic without feedback | `adamw_bf16_sr`, `optim_args="error_feedback=False"` | a BF16 weight |
| rounded to nearest | torch's AdamW after `model.to(torch.bfloat16)` | a BF16 weight, even in norm layers |
| autocast | torch's AdamW with `bf16=True` | FP32 |

**Differences.** Runs with the same seed start from the same FP32 weights and see the same data. A difference is a run's
loss on held-out text minus FP32's: the mean over seeds, with a 95% t interval. It says nothing about other data. The
16-bit modes round the initial weights; split and Kahan keep the rounding errors.

**Verdicts.** Each comparison gets the first verdict that applies:

| verdict | where the interval lies |
| --- | --- |
| equal, above (below) zero | within ±{LIMIT} (unless another limit is named), excluding zero |
| equal | within the same limit, including zero |
| worse, better | entirely beyond the limit |
| above, below | entirely on one side of zero |
| undecided | anywhere else |

The limit was 0.01 for the first results; we lowered it to {LIMIT} when most results were known. A difference of {LIMIT}
nats per byte is about 0.02 in Trainer's loss per token, or 3% of the steps of the [long runs](#steps). The other limits
were fixed before their experiments ran.

**Measure again.** In a checkout, run `make .venv`, then the command of a section, which keeps the results in FOLDER. If
you interrupt it, run it again with the same FOLDER to resume. Without `--night` or `--full`, the experiment is smaller;
`make evidence` runs all of these in an hour on two cores. `--cases "split *"` selects runs. Without `--output`, the
command prints the [saved results](../../benchmarks/results/evidence), with all published claims and the tables that
this page leaves out. Each experiment's settings are in [its file](../../benchmarks/evidence/experiments).
`python -m benchmarks.evidence.page` writes this page.
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
        tables: further tables, in Markdown, which the command of the section prints.
        question: what is asked.
        answer: in words, with the decisive figures.
        model: the largest model, in words.
        figure: name of a picture in `docs/images` and what it shows; empty if there is none.
        table: for the page; without one, the page has only the question and the answer.
        primary: the primary claims among its claims.
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
    primary: tuple[Row, ...] = ()

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
        f"A byte-level transformer with {shape.parameters():,} parameters ({shape.layers} layers, width {shape.width}) "
        f"trains with {settings['seeds']} seeds on {settings['sequences']} × {shape.length} bytes of Python's standard "
        "library per step."
    )


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = True) -> str:
    """A table; all columns but the first are aligned to the right, if they are `numbers`."""
    heads = list(heads)
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(experiment: Experiment, record: dict[str, Any]) -> str:
    """A part of the page in Markdown, with the claims and tables that the page leaves out."""
    found = experiment.section(record)
    return "\n\n".join([_rendered(found, record), *([_claims(found.rows)] if found.rows else []), *found.tables])


def _claims(shown: Sequence[Row]) -> str:
    columns = ("claim", "verdict", "measured", "published", "source")
    rows = [(row.claim, row.verdict, row.ours, row.published, row.source) for row in shown]
    kept = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    return markdown_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], numbers=False)


def _arguments(record: dict[str, Any]) -> str:
    """Of the command, for the experiment of a record."""
    return record["experiment"] + (f" --{record['size']}" if record["size"] != SIZES[0] else "")


def _rendered(found: Section, record: dict[str, Any]) -> str:
    cases = record["cases"].values()
    hours = sum(case["seconds"] for case in cases) / 3600
    device = f" --device {record['device']}" if "device" in record else ""
    machines = sorted({machine.get("gpu", machine["cpu"]) for machine in (case["machine"] for case in cases)})
    versions = sorted({case["machine"]["torch"] for case in cases})
    time = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    command = (
        f"`.venv/bin/python -m benchmarks.evidence {_arguments(record)}{device} --output FOLDER` took {time} "
        f"in one process ({', '.join([*machines, 'torch ' + ' and '.join(versions)])})."
    )
    name, words = found.figure
    pictures = [f"![{words}](../images/{name}{end})" for end in (".svg#only-light", "-dark.svg#only-dark") if name]
    return "\n\n".join([
        f"## {found.title}",
        *pictures,
        *filter(None, [found.table]),
        '<details markdown="1"><summary>Setup</summary>',
        found.text,
        command,
        "</details>",
    ])  # fmt: skip


def page() -> str:
    """The whole page."""
    parts, found, summary = list[str](), list[Section](), list[list[str]]()
    for name in EXPERIMENTS:
        recorded = [path for size in SIZES if (path := RESULTS / f"{name}-{size}.json").exists()]
        if recorded:
            record: dict[str, Any] = json.loads(recorded[-1].read_text(encoding="utf-8"))
            found.append(each := experiment(name).section(record))
            if each.table:
                parts.append(_rendered(each, record))
            question = f"[{each.question}]({each.link})" if each.table else f"{each.question} (`{_arguments(record)}`)"
            summary.append([question, each.answer, each.model])
    primary = [[row.claim, row.verdict, row.ours] for each in found for row in each.primary]
    published = [row for each in found for row in each.rows if row.source]
    refuted = [row for row in published if row.verdict not in ("yes", "holds")]
    head = _HEAD.rstrip().format(
        LIMIT=LIMIT,
        CONFIDENCE=1 - (1 - CONFIDENCE) / PRIMARY,
        summary=markdown_table(("question", "answer", "largest model, parameters"), summary, numbers=False),
        primary=markdown_table(("claim", "verdict", "loss − FP32's"), primary, numbers=False),
        confirmed=f"{len(published) - len(refuted)} of {len(published)}",
        refuted=_claims(refuted),
    )
    return "\n\n".join([head, *parts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
