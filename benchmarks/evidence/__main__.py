"""See the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.evidence import EXPERIMENTS, __doc__, experiment, harness, page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"experiments ({', '.join(EXPERIMENTS)}); default all",
    )
    size = parser.add_mutually_exclusive_group()
    for each, help in zip(harness.SIZES[1:], ("hours", "days on a real machine"), strict=True):
        size.add_argument(f"--{each}", dest="size", action="store_const", const=each, help=f"a larger size: {help}")
    parser.set_defaults(size="hour")
    parser.add_argument("--cases", help="patterns of names, separated by commas; default all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: as many as processors")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each (default 1)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--output", type=Path, help="a folder of records and checkpoints; default: the repository's")
    parser.add_argument("--data-dir", type=Path, help="a folder of .txt files, and of .npz files for `applications`")
    options = parser.parse_args()
    if unknown := set(options.names) - set(EXPERIMENTS):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}; choose from {', '.join(EXPERIMENTS)}")
    if options.data_dir and not options.output:
        parser.error("--data-dir needs --output: the repository's records are of the standard library")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    torch.set_num_threads(options.threads)
    if options.device == "cuda":  # the same record from the same seeds
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if options.output and options.output.is_file():
        parser.error(f"--output {options.output} is a file; it takes a folder")
    names, cases = options.names or EXPERIMENTS, options.cases.split(",") if options.cases else None
    if options.device != "cpu" and (others := [name for name in names if not experiment(name).on_gpus]):
        parser.error(f"--device {options.device}: {', '.join(others)} run on a CPU only")
    for found in map(experiment, names if cases else ()):
        harness.chosen(found.cases(found.settings[found.size(options.size)]), cases, found)
    command = [sys.executable, "-m", "benchmarks.evidence", *sys.argv[1:], "--processes=1"]  # the last one counts
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(options.processes - 1)]
    for found in map(experiment, names):
        if not options.names and (missing := found.missing()):
            print(f"{found.name} is left out: {missing}", flush=True)
            continue
        record = harness.run(found, options.size, cases, options.output, options.data_dir, options.device)
        print(page.section(found, record), flush=True)
    failed = [other.wait() for other in others]
    if any(failed):
        raise SystemExit("another process failed, see above")


if __name__ == "__main__":
    # Before CUDA begins; see `use_deterministic_algorithms`.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None
