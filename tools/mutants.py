"""Plant the faults of `mutants.txt` in copies of the repository, one by one, and run the tests that must notice them.

    python -m tools.mutants [--check] [-k TEXT] [-n PROCESSES]

The file says what goes wrong, which lines (`-`) become which (`+`), in whatever file of the package they are, and which
tests must not all pass then. They are run without a fault as well. `--check` only sees whether faults can be planted.
"""

import argparse
import ast
import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("tests.conftest", "transformers.trainer", "torch.distributed.fsdp", "typer")
"""Imported once, so that no test has to. The first sets environment variables that the others read."""


class Fault(NamedTuple):
    """A mistake: `text`, which is in the package once, becomes `replacement`."""

    breaks: str
    text: str
    replacement: str
    tests: list[str]

    def path(self) -> Path:
        """The file that contains the text."""
        counts = {path: count for path, content in _files("hf_lowprec").items() if (count := content.count(self.text))}
        if [*counts.values()] != [1]:
            raise ValueError(f"{self.breaks}: {self.text!r} is not once in the package, but {counts}")
        return next(iter(counts))

    def content(self) -> str:
        """The content of this file with the fault."""
        return _files("hf_lowprec")[self.path()].replace(self.text, self.replacement)


@functools.cache
def _files(folder: str) -> dict[Path, str]:
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}


def _test_ids(test: str) -> Iterator[str]:
    for path, content in _files("tests").items():
        if f"def {test}(" not in content:  # searching takes a hundred times as long
            continue
        for match in re.finditer(rf"^( *)def {test}\(", content, re.M):
            classes = re.findall(r"^class (\w+)", content[: match.start()], re.M) if match[1] else []
            yield "::".join([str(path), *classes[-1:], test])


def read_faults() -> list[Fault]:
    """The faults of the file. Raises ValueError or SyntaxError unless all can be planted and their tests exist."""
    faults = []
    for entry in re.split(r"\n\n+", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip()):
        breaks, *lines = entry.split("\n")
        text, replacement = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        faults.append(Fault(breaks, text, replacement, [line for line in lines if line[0] not in "-+"]))
        ast.parse(faults[-1].content(), breaks)
        if text == replacement or not all(any(_test_ids(test)) for test in faults[-1].tests or ["none"]):
            raise ValueError(f"{breaks}: nothing changes, or there is no test of this name")
    return faults


def _start(fault: Fault | None, tests: list[str], folder: Path) -> int:
    """Run tests in a process with a copy of the repository and caches of its own; returns the process's number."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "docs", "site", "build"))
    if fault is not None:
        (copy / fault.path()).write_text(fault.content(), encoding="utf-8")
    if pid := os.fork():
        return pid
    code = -1
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(copy)
        sys.path = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tools")]:
            del sys.modules[name]
        path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
        os.environ |= {"PYTHONPATH": path, "HF_LOWPREC_CACHE": f"{copy}/c", "TRITON_CACHE_DIR": f"{copy}/triton"}
        ids = [test_id for test in tests for test_id in _test_ids(test)]
        code = importlib.import_module("pytest").main(["-xq", "-p", "no:cacheprovider", *ids])
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="only see whether the faults can be planted")
    parser.add_argument("-k", default="", metavar="TEXT", help="only faults with this in their entry or path")
    parser.add_argument("-n", type=int, default=2, metavar="PROCESSES")
    args = parser.parse_args()
    faults = [fault for fault in read_faults() if args.k in f"{fault.path()} {fault}"]
    if args.check:
        sys.exit()
    for module in PRELOADED:
        importlib.import_module(module)
    tests = sorted({test for fault in faults for test in fault.tests})
    jobs: list[Any] = [(None, part) for k in range(args.n) if (part := tests[k :: args.n])]
    jobs += [(fault, fault.tests) for fault in faults]
    running, counts = dict[int, tuple[Fault | None, Any]](), Counter[str]()
    while jobs or running:
        while jobs and len(running) < args.n:
            fault, tests = jobs.pop(0)
            folder = tempfile.TemporaryDirectory()
            running[_start(fault, tests, Path(folder.name))] = fault, folder
        pid, status = os.wait()
        fault, folder = running.pop(pid)
        output = Path(folder.name, "output").read_text(errors="replace")
        code = 2 if "pytest-timeout" in output else os.waitstatus_to_exitcode(status)
        outcome = {0: "survived", 1: "killed"}.get(code, "not tested") if fault else "failed" if code else "passed"
        room = fault.path().parts[1] if fault else "without fault"
        counts[f"{outcome:<10} {room}"] += 1
        print(f"{outcome:<10} {room:<14} {fault.breaks if fault else ''}", flush=True)
        print(output[-4000:] if outcome in ("not tested", "failed") else "", end="", flush=True)
        folder.cleanup()
    print(*(f"{counts[line]:4}  {line}" for line in sorted(counts)), sep="\n")
    sys.exit(any(not line.startswith(("killed", "passed")) for line in counts))
