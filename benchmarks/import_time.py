"""What `import hf_lowprec` costs, and the help of the command line.

Each round starts new interpreters, one after the other, and the differences are taken within a round. Processor time is
that of all threads, user and system.

    python benchmarks/import_time.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise

HELP = "import sys, hf_lowprec_cli; sys.argv = ['hf-lowprec', '--help']; hf_lowprec_cli.main()"
PROGRAMS = {
    "import torch": "import torch",
    "import torch, transformers": "import torch, transformers",
    "… from transformers import Trainer": "import torch, transformers; from transformers import Trainer",
    "… import hf_lowprec": "import torch, transformers; from transformers import Trainer; import hf_lowprec",
}
"""Each program imports what the one before it does, and one thing more."""
COMMANDS = {"import typer, rich": "import typer, rich", "hf-lowprec --help": HELP}


def seconds(program: str) -> tuple[float, float]:
    """Wall time and processor time of a new interpreter that runs `program`."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def print_table(programs: dict[str, str], rounds: int) -> None:
    """Print medians over the rounds, and the medians of the differences from the program in the line before."""
    measured = {name: [] for name in programs}
    for program in programs.values():  # what is read for the first time is not yet in the page cache
        seconds(program)
    for _ in range(rounds):
        for name, program in programs.items():
            measured[name].append(seconds(program))
    differences = {
        after: [
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(measured[before], measured[after], strict=True)
        ]
        for before, after in pairwise(programs)
    }
    print("\n| program | wall time, s | processor time, s | more than the line before |\n| --- | ---: | ---: | ---: |")
    for name, times in measured.items():
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        more = ""
        if name in differences:
            more = "{:.2f} / {:.2f}".format(*map(statistics.median, zip(*differences[name], strict=True)))
        print(f"| `{name}` | {wall:.2f} | {processor:.2f} | {more} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print_table(COMMANDS, options.rounds)
    print_table(PROGRAMS, options.rounds)


if __name__ == "__main__":
    main()
