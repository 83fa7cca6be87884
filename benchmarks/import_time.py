"""Measure the time of `import hf_lowprec` and of the command line's help.

Each round starts new interpreters. One imports torch, transformers, Trainer and hf_lowprec, in this order, and times
each; the others run `hf-lowprec --help` and import what it needs at least. Processor time is that of all threads, user
and system.

    python benchmarks/import_time.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

IMPORTS = ("import torch", "import transformers", "from transformers import Trainer", "import hf_lowprec")
"""The imports of a script that uses hf_lowprec; each needs those before it."""
IN_ORDER = """
import json, sys, time
times = {}
for statement in json.loads(sys.argv[1]):
    start = time.perf_counter(), time.process_time()
    exec(statement)
    times[statement] = time.perf_counter() - start[0], time.process_time() - start[1]
print(json.dumps(times))
"""
COMMANDS = {
    "import typer, rich": "import typer, rich",
    "hf-lowprec --help": "import sys, hf_lowprec_cli; sys.argv = ['hf-lowprec', '--help']; hf_lowprec_cli.main()",
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
    return {**commands, **json.loads(run(IN_ORDER, json.dumps(IMPORTS))[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    one_round()  # reads files that are not in the page cache yet
    rounds = [one_round() for _ in range(options.rounds)]
    print("| | wall time, s | processor time, s | its range |\n| --- | ---: | ---: | ---: |")
    for name in rounds[0]:
        wall, processor = zip(*(times[name] for times in rounds), strict=True)
        middle = f"{statistics.median(wall):.2f} | {statistics.median(processor):.2f}"
        print(f"| `{name}` | {middle} | {min(processor):.2f} to {max(processor):.2f} |")


if __name__ == "__main__":
    main()
