"""Test the kernels on this machine's GPU, measure them, and pack the results into one file to send back.

Runs the tests that only a GPU can answer, the most important first, and then the benchmark of `make bench-gpu`, within
a time limit. Results are written to a folder as they come; at the end it becomes `gpu-report-DATE-TIME.zip`.

    python benchmarks/gpu_report.py [--minutes 10] [--output FOLDER]
    python benchmarks/gpu_report.py --rehearse       # on the CPU, in Triton's interpreter: no time means anything

Exit status: 1 if a test failed, or something of ours failed in the benchmark; 2 without a GPU. Tests for which there
was no time have not failed; the report counts them as "not reached".
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/optim/test_triton_kernels.py",
    "tests/optim/test_sums.py",
    "tests/gpu/test_step_on_gpu.py",
    "tests/gpu/test_training_on_gpu.py",
    "tests/optim/test_backends.py",
    "tests/optim/test_split.py",
    "tests/optim/test_clipping.py",
    "tests/optim/test_changes_from_outside.py",
    "tests/optim/test_step_counts.py",
    "tests/optim/test_mode_change.py",
    "tests/optim/test_early_gradients.py",
    "tests/gpu/test_sanitizer_on_gpu.py",
]
"""In the order of their importance, since time may run out."""
ON_A_GPU = "(gpu or triton) and not native"
"""Of the tests in these files, those that run on the GPU, as an expression of pytest's `-k`."""
WORKERS = min(16, os.cpu_count() or 1)
"""Processes that test, if pytest-xdist is installed: most of the time, a test waits for the compiler, on the CPU."""
SHARE_OF_TESTS = 0.45
"""Of the time, at most; the benchmark has the rest."""
PACKING = 10.0
"""Seconds that are kept for the end."""
RECORD = "GPU_REPORT_RECORD"
"""The environment variable that names the file to which pytest, with this module as a plugin, writes each result."""


def pytest_collection_finish(session: Any) -> None:
    """Record how many tests there are."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # all workers collect the same, and xdist itself nothing
        _record(f"collected {len(session.items)}\n" if session.items else "")


def pytest_runtest_logreport(report: Any) -> None:
    """Record how a test ended, and the traceback of one that failed."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or not report.passed):
        traceback = f"{report.longreprtext}\n" if report.failed else ""
        _record(f"{report.outcome} {report.nodeid}\n" + textwrap.indent(traceback, "    "))


def _record(text: str) -> None:
    if RECORD in os.environ:
        with open(os.environ[RECORD], "a", encoding="utf-8") as file:
            file.write(text)


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: its exit status; None if it was stopped because its time was over.
        seconds: that it ran.
    """

    status: int | None
    seconds: float

    def __str__(self) -> str:
        how = "stopped, since its time was over" if self.status is None else f"exit status {self.status}"
        return f"{how}, {self.seconds:.0f} s"


def run(command: Sequence[str], log: Path, seconds: float, **variables: str) -> Outcome:
    """Run `command` for at most `seconds`, writing its output to `log` and showing the end of it.

    When its time is over, it is killed with all the processes that it has started.
    """
    started = time.monotonic()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**inherited, "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0", **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]), flush=True)
    return Outcome(status, time.monotonic() - started)


def run_tests(files: Sequence[str], record: Path, seconds: float, **variables: str) -> Outcome:
    """Run the tests in `files` that run on the GPU, in this order, and write each result to `record`."""
    command = [sys.executable, "-m", "pytest", "-o", "minversion=8.0", "-p", "no:cacheprovider", "-p", "gpu_report"]
    if importlib.util.find_spec("xdist"):  # one test at a time for each process, which keeps their order
        command += ["-n", str(WORKERS), "--dist", "load", "--maxschedchunk", "1"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    variables |= {"PYTHONPATH": path, RECORD: str(record)}
    return run([*command, "-k", ON_A_GPU, *files], record.with_suffix(".log"), seconds, **variables)


def test_results(record: Path) -> tuple[dict[str, int], list[str]]:
    """The number of tests by result, and the names of those that failed."""
    collected, results = 0, {}
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else []:
        word, _, rest = line.partition(" ")
        if word == "collected":
            collected = int(rest)
        elif word:  # a tear-down that fails comes after the test that passed
            results[rest] = word
    counts = Counter(results.values())
    numbers = {word: counts[word] for word in ("passed", "failed", "skipped")}
    return {**numbers, "not reached": collected - len(results)}, [name for name in results if results[name] == "failed"]


def summary(tests: Outcome, record: Path, benchmark: Outcome, tables: Sequence[Path]) -> str:
    """The summary in Markdown: how both parts ended, which tests failed, and the tables of the benchmark."""
    counts, failed = test_results(record)
    lines = [f"# GPU report, {datetime.now():%Y-%m-%d}", ""]
    lines += [f"- tests: {', '.join(f'{result}: {count}' for result, count in counts.items())} ({tests})"]
    lines += [f"- benchmark: {benchmark}", ""]
    if not record.exists():
        lines += ["No test has begun; `tests.log` says why.", ""]
    if failed:
        lines += [f"Tests that failed (`{record.name}` says how):", "", *(f"- `{name}`" for name in failed), ""]
    return "\n".join([*lines, *(table.read_text(encoding="utf-8") for table in tables)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="time limit (default: 10)")
    parser.add_argument("--output", type=Path, default=Path.cwd(), help="folder of the file (default: this one)")
    parser.add_argument("--rehearse", action="store_true", help="run everything on the CPU, on small shapes")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes - PACKING
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print("report-gpu: torch sees no GPU here; --rehearse runs everything else", file=sys.stderr)
        return 2
    folder = options.output.resolve() / f"gpu-report-{datetime.now():%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True)
    facts = "from hf_lowprec.tools.machine_checks import show_versions; print(show_versions())"
    run([sys.executable, "-c", facts], folder / "machine.txt", 60, PYTHONPATH=str(ROOT))
    record, seconds = folder / "tests.txt", SHARE_OF_TESTS * (end - time.monotonic())
    tests = run_tests(TESTS, record, seconds, TRITON_INTERPRET="0" if torch.cuda.is_available() else "1")
    left = end - time.monotonic()
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), "--output", str(folder)]
    script += ["--seconds", str(int(left - 30)), *(["--rehearse"] if options.rehearse else [])]
    benchmark = run(script, folder / "benchmark.log", left)
    text = summary(tests, record, benchmark, sorted(folder.glob("*.md")))
    (folder / "report.md").write_text(text, encoding="utf-8")
    counts, _ = test_results(record)
    path = shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)
    print(f"\n{text}\nPacked into {path}: please send this file back.")
    tested = tests.status in (0, None) and counts["passed"] > 0 and counts["failed"] == 0
    return 0 if tested and benchmark.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
