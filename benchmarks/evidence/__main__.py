"""See the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.evidence import __doc__, halting, harness, learning_rates, page, reinforcement, shared_bits, steps

_MODULES = (halting, steps, learning_rates, shared_bits, reinforcement)
EXPERIMENTS = {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"experiments ({', '.join(EXPERIMENTS)}); default all")
    size = parser.add_mutually_exclusive_group()
    for each, help in zip(harness.SIZES[1:], ("what fits into a night", "for days on a real machine"), strict=True):
        size.add_argument(f"--{each}", dest="size", action="store_const", const=each, help=f"settings: {help}")
    parser.set_defaults(size="hour")
    parser.add_argument("--cases", help="separated by commas; default all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: as many as processors")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each (default 1)")
    parser.add_argument(
        "--output", type=Path, help="a folder of records and checkpoints, to run again what is in the repository's"
    )
    parser.add_argument("--data-dir", type=Path, help="a folder of text files; default: the standard library")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    command = [sys.executable, "-m", "benchmarks.evidence", *sys.argv[1:], "--processes=1"]  # the last one counts
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(options.processes - 1)]
    cases = options.cases.split(",") if options.cases else None
    for name in options.names or EXPERIMENTS:
        record = harness.run(EXPERIMENTS[name], options.size, cases, options.output, options.data_dir)
        print(page.section(EXPERIMENTS[name].section(record), record), flush=True)
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
