"""Check the golden recording in full, renew it, or compare this machine's results with another commit's.

python -m tests.golden check              everything, with the native backend: a minute
python -m tests.golden check eager        steps and checkpoints with another backend, too
python -m tests.golden against COMMIT     what depends on the machine, too: runs COMMIT's package and this one
python -m tests.golden renew              replace recording.json; tests/golden/README.md tells when that is right
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.golden import recording, steps, trainer

ROOT = Path(__file__).resolve().parents[2]


def check(backend: str) -> list[str]:
    """Everything."""
    recorded, found = recording.read(), recording.record()
    different = list(recording.differences(recorded, found))
    for run in recording.RUNS if backend != "native" else ():  # which `record` has run
        wanted = {section: recorded[section][run] for section in ("steps", "checkpoints")}
        different += recording.differences(wanted, recording.in_this_process(run, backend), f"{backend} / {run}")
    return different


def against(commit: str) -> list[str]:
    """Results of this machine: those of `commit`'s package, and those of this one."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, "hf_lowprec"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        before, now = (results(Path(place), Path(folder, "found.json")) for place in (folder, ROOT))
    return list(recording.differences(before, now))


def results(package: Path, file: Path) -> dict[str, Any]:
    """The results of `tests.golden.machine` with the `hf_lowprec` in the folder `package`."""
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-m", "tests.golden.machine", str(file)], cwd=package, env=environment, check=True)
    found = json.loads(file.read_text())
    used = Path(found.pop("package"))
    if used.resolve() != package.resolve():
        raise RuntimeError(f"hf_lowprec was imported from {used}, not from {package}")
    return found


def renew() -> None:
    """Write the recording. Checkpoints are written where there is none yet: those of an earlier commit stay."""
    steps.CHECKPOINTS.mkdir(exist_ok=True)
    for run in recording.RUNS:
        if not steps.checkpoint_path(*run.split()).exists():
            steps.write_checkpoint(*run.split())
    if not trainer.CHECKPOINT.exists():
        with tempfile.TemporaryDirectory() as folder:
            trainer.write(Path(folder))
    recording.write(recording.record())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument(
        "backend", nargs="?", default="native", choices=["native", "eager", "triton"]
    )
    commands.add_parser("against").add_argument("commit")
    commands.add_parser("renew")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)  # NumPy's, in Triton's interpreter
    if options.command == "renew":
        renew()
        return
    different = check(options.backend) if options.command == "check" else against(options.commit)
    print("\n".join(different) or "nothing differs")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
