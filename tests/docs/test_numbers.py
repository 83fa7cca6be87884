"""Numbers in the pages are those in the files that they were taken from."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import pytest

from tests.support.docs.pages import ROOT, pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS = ROOT / "benchmarks" / "results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def result(name: str) -> dict[str, Any]:
    """The results of a benchmark, of its latest run."""
    return json.loads(max(RESULTS.glob(f"{name}-20??-??-??.json")).read_text(encoding="utf-8"))


def fine_tuning(way: str, seeds: str = "2026-11-21-seeds-*") -> list[dict[str, Any]]:
    """The fine-tuning runs of a variant in the files of `text_quality.py`, by seed; the first is that of the demo."""
    files = sorted(RESULTS.glob(f"text-quality-{seeds}.json"))
    runs = [run for file in files for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    return [run["stages"][1]["runs"][way] for run in sorted(runs, key=lambda run: run["seed"])]


def demo() -> list[str]:
    fp32, nearest, sr = (fine_tuning(way)[0] for way in ("fp32", "nearest", "sr"))
    kahan = fine_tuning("kahan", "2026-11-22-seeds-0-9-kahan")[0]
    return [
        f"validation loss ({fp32['start']:.4f} before)",
        f"| FP32 AdamW | {fp32['final']:.4f} | 16 | {abs(fp32['lost_updates']):.0%} |",
        f"| {nearest['final']:.4f} | 8 | {nearest['lost_updates']:.0%} |",
        f"| `adamw_bf16_kahan` | {kahan['final']:.4f} | 10 | {kahan['lost_updates']:.0%} |",
        f"| `adamw_bf16_sr` | {sr['final']:.4f} | 8 | {sr['lost_updates']:.0%} on average |",
    ]


def lost_updates(digits: int, words: str) -> Callable[[], list[str]]:
    return lambda: [words.format(f"{100 * mean(run['lost_updates'] for run in fine_tuning('nearest')):.{digits}f}%")]


def micro_batches() -> list[str]:
    by_count = result("micro-batches")["results"].values()
    errors = {mode: [100 * of[mode]["relative error"] for of in by_count] for mode in ("nearest", "kahan", "fp32")}
    nearest = ", ".join(f"{error:.2f}%" if error < 1 else f"{error:.1f}%" for error in errors["nearest"])
    too_short = max(100 * of["nearest"]["too short"] for of in by_count)
    kahan, fp32 = (f"{min(errors[name]):.2f}% to {max(errors[name]):.2f}%" for name in ("kahan", "fp32"))
    return [f"| 0 | {nearest} (and {too_short:.1f}% too short)", f"| 2 | {kahan}", f"| `fp32` | 4 | {fp32} |"]


def bytes_of_others() -> dict[str, str]:
    return {name: f"{values[0]:.2f}" for name, values in result("peers")["parts"]["bytes"].items()}


def bytes_when_migrating() -> list[str]:
    found = bytes_of_others()
    torchao, bnb = found["torchao AdamW8bit, weights stochastic"], found["bitsandbytes AdamW8bit, weights nearest"]
    in_fp32, ours = found["bitsandbytes AdamW8bit, FP32 weights"], found["hf_lowprec AdamW, stochastic, 8-bit states"]
    return [
        f"8-bit states | {torchao} and {bnb} with BF16 weights, {in_fp32} (bitsandbytes) with FP32 |",
        f"`AdamW8bit` takes {torchao} bytes with BF16 weights",
        f"does here ({ours})",
        f"That makes {bnb} bytes with BF16 weights and {in_fp32} with FP32 weights",
    ]


def table(script: str, name: str) -> Callable[[], list[str]]:
    """The rows of the table that a benchmark prints of its results."""
    return lambda: importlib.import_module(script).table(result(name)).splitlines()


def import_times() -> list[str]:
    taken = result("import-time")["processor seconds"]
    ours = median(taken["import hf_lowprec"])
    with_trainer = ours + median(taken["from transformers import Trainer"])
    return [f"pays {ours:.1f} seconds for hf_lowprec", f"otherwise, pays {with_trainer:.1f}."]


def requirements() -> list[str]:
    least = {re.split(r"\W", need)[0]: re.split(">=", need)[1] for need in PROJECT["dependencies"]}
    python = PROJECT["requires-python"].removeprefix(">=")
    return [f"needs Python {python}, torch {least['torch']} and transformers {least['transformers']}, or newer"]


TEXTS: list[tuple[str, Callable[[], list[str]]]] = [
    ("README.md", requirements),
    ("README.md", demo),
    ("docs/index.md", demo),
    ("docs/performance/accuracy.md", lost_updates(1, "| {} |")),
    ("docs/guides/migrating.md", lost_updates(0, "lost {} of the weight changes")),
    ("docs/guides/migrating.md", bytes_when_migrating),
    (
        "docs/performance/other-packages.md",
        lambda: [f"| {name} | {size} |" for name, size in bytes_of_others().items()],
    ),
    ("docs/guides/distributed.md", micro_batches),
    ("docs/performance/training.md", table("gradient_release", "gradient-release")),
    ("docs/performance/training.md", table("checkpoint_checksums", "checkpoint-checksums")),
    ("docs/performance/training.md", table("import_time", "import-time")),
    ("docs/performance/training.md", import_times),
]
"""Pages, and what must be in them."""


@pytest.mark.parametrize(("page", "texts"), TEXTS, ids=[page for page, _ in TEXTS])
def test_a_page_says_what_was_measured(page: str, texts: Callable[[], list[str]], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    content = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [text for text in texts() if text not in content] == []


def test_extras_that_are_named_exist() -> None:
    sources = [*pages(), *(ROOT / "hf_lowprec").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"pip install[^\n]*'\.\[(\w+)\]", path.read_text("utf-8"))}
    assert len(named) > 3
    assert named <= {*PROJECT["optional-dependencies"]}
