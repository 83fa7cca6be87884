"""Test the kernels on this machine's GPU, measure them, and pack the results into one file to send back.

Runs `make test-gpu` and `make bench-gpu` within a time limit, and writes `gpu-report-DATE.zip`: a summary, the log and
the JUnit record of the tests, the tables of the benchmark, and the facts about the machine.

    python benchmarks/gpu_report.py [--minutes 10] [--output FOLDER]
    python benchmarks/gpu_report.py --rehearse       # on the CPU: the tests skip themselves, no time means anything

Exit status: 1 if a test failed, or something of ours failed in the benchmark; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/gpu", "tests/optim"]
SHARE_OF_TESTS = 0.45
"""Of the time, at most; the benchmark has the rest."""
PACKING = 10.0
"""Seconds that are kept for the end."""
GRACE = 15.0
"""Seconds that an interrupted command has until it is killed."""


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


def run(command: Sequence[str], log: Path, seconds: float) -> Outcome:
    """Run `command` for at most `seconds`, showing its output and writing it to `log`.

    When its time is over, it is interrupted as by Ctrl-C, so that pytest writes its record; `GRACE` seconds later it is
    killed, with all the processes that it has started.
    """
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    with log.open("w", encoding="utf-8") as file:
        # A shell starts what ends in `&` with interrupts ignored, and children would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            list(command), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        signal.signal(signal.SIGINT, before)
        status: int | None = None
        try:
            status = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]), flush=True)
    return Outcome(status, time.monotonic() - started)


def test_results(record: Path) -> tuple[dict[str, int], list[str]]:
    """The number of tests by result, and the names of those that failed, from pytest's JUnit record."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    failed = []
    if record.exists():
        for case in ElementTree.parse(record).iter("testcase"):
            if case.get("name") is None:
                continue  # interrupted
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts[result] += 1
            if result == "failed":
                failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def summary(tests: Outcome, record: Path, benchmark: Outcome, tables: Sequence[Path]) -> str:
    """The summary in Markdown: how both parts ended, which tests failed, and the tables of the benchmark."""
    counts, failed = test_results(record)
    lines = [f"# GPU report, {date.today()}", ""]
    lines += [f"- tests: {', '.join(f'{count} {result}' for result, count in counts.items())} ({tests})"]
    lines += [f"- benchmark: {benchmark}", ""]
    if failed:
        lines += ["Tests that failed (`tests.log` says how):", "", *(f"- `{name}`" for name in failed), ""]
    if not record.exists():
        lines += ["The tests left no record; `tests.log` says how far they came.", ""]
    return "\n".join([*lines, *(table.read_text(encoding="utf-8") for table in tables)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="time limit (default: 10)")
    parser.add_argument("--output", type=Path, default=Path.cwd(), help="folder of the file (default: this one)")
    parser.add_argument("--rehearse", action="store_true", help="run everything on the CPU, on small shapes")
    options = parser.parse_args(arguments)
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print("report-gpu: torch sees no GPU here; --rehearse runs everything else", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes - PACKING
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "tests.xml"
        facts = "from hf_lowprec.cli import app; app(['env'])"
        run([sys.executable, "-c", facts], folder / "machine.txt", 60)
        chosen = TESTS[:1] if options.rehearse else TESTS
        pytest = [sys.executable, "-m", "pytest", "-o", "minversion=8.0", *chosen, "-k", "not native"]
        seconds = SHARE_OF_TESTS * (end - time.monotonic())
        tests = run([*pytest, f"--junitxml={record}", "-p", "no:cacheprovider"], folder / "tests.log", seconds)
        left = end - time.monotonic()
        script = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), "--output", str(folder)]
        script += ["--seconds", str(int(left - 30)), *(["--rehearse"] if options.rehearse else [])]
        benchmark = run(script, folder / "benchmark.log", left)
        text = summary(tests, record, benchmark, sorted(folder.glob("*.md")))
        (folder / "report.md").write_text(text, encoding="utf-8")
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"gpu-report-{date.today()}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in sorted(folder.iterdir()):
                packed.write(file, file.name)
    print(f"\n{text}\nPacked into {path}: please send this file back.")
    return 0 if tests.status == 0 and benchmark.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
