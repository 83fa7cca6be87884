"""Measure the time of `import hf_lowprec` and of the command line's help.

Each round starts new interpreters: a script with its own loop, one with Trainer, and `hf-lowprec --help` beside what it
needs at least. Processor time is that of all threads, user and system.

    python benchmarks/import_time.py [--rounds 9] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recorded_run import recorded_run

OWN_LOOP = ("import torch", "torch.optim.SGD([torch.ones(1)])", "import hf_lowprec", "hf_lowprec.AdamW")
"""What a script with its own loop does, in this order. With its first optimizer, torch imports its compiler."""
TRAINER = ("from transformers import Trainer", "import hf_lowprec, wrapping Trainer")
"""What a script with Trainer does."""
IN_ORDER = """
import json, sys, time
times = {}
for statement in json.loads(sys.argv[1]):
    start = time.perf_counter(), time.process_time()
    exec(statement.partition(", wrapping")[0])
    times[statement] = time.perf_counter() - start[0], time.process_time() - start[1]
print(json.dumps(times))
"""
COMMANDS = {
    "import typer, rich": "import typer, rich",
    "hf-lowprec --help": "import sys; sys.argv = ['', '--help']; from hf_lowprec.__main__ import main; main()",
}
Times = dict[str, tuple[float, float]]


def run(*arguments: str) -> tuple[str, tuple[float, float]]:
    """The output of a new interpreter, and its wall time and processor time."""
    before, start = os.times(), time.perf_counter()
    out = subprocess.run([sys.executable, "-c", *arguments], check=True, capture_output=True, text=True).stdout
    wall, after = time.perf_counter() - start, os.times()
    return out, (wall, sum(after[2:4]) - sum(before[2:4]))


def one_round() -> Times:
    """The times of each import and command."""
    commands = {name: run(program)[1] for name, program in COMMANDS.items()}
    scripts = (json.loads(run(IN_ORDER, json.dumps(statements))[0]) for statements in (OWN_LOOP, TRAINER))
    return {**commands, **next(scripts), **next(scripts)}


def table(result: dict[str, Any]) -> str:
    """The processor times in Markdown."""
    lines = ["| | median | range |", "| --- | ---: | ---: |"]
    for name, taken in result["processor seconds"].items():
        title = f"then `{name}`" if name in (*OWN_LOOP[1:], *TRAINER[1:]) else f"`{name}`"
        lines.append(f"| {title} | {statistics.median(taken):.2f} | {min(taken):.2f} to {max(taken):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    one_round()  # reads files that are not in the page cache yet
    with recorded_run(options) as result:
        rounds = [one_round() for _ in range(options.rounds)]
        for k, clock in enumerate(("wall seconds", "processor seconds")):
            result[clock] = {name: [times[name][k] for times in rounds] for name in (*OWN_LOOP, *TRAINER, *COMMANDS)}
    print(table(result))


if __name__ == "__main__":
    main()
