"""The recording: what is in it, where it lies, and how two of them differ."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_lowprec
from tests.golden import casting, steps, trainer
from tests.support.processes import forkserver

FILE = Path(__file__).with_name("recording.json")
PROCESSES = Path(__file__).with_name("processes.py")
RUNS = [f"{algorithm} {mode}" for algorithm in steps.ALGORITHMS for mode in steps.MODES]
"""Every algorithm and mode."""
FEW_RUNS = [f"{algorithm} {steps.MODES[number % 4 - 2]}" for number, algorithm in enumerate(steps.ALGORITHMS)]
"""Every algorithm in one mode and every mode with one algorithm; "AdamW kahan" among them."""
ON_RANKS = ("Adafactor", "AdamW", "Adan", "Muon")
"""Algorithms of those, one in each mode, that ranks and Trainer run as well."""
SECTIONS = {
    "one process": "one process",
    "DDP, two ranks": "two ranks",
    "FSDP2, two ranks": "two ranks",
    "DDP, three ranks": "three ranks",
    "FSDP2, three ranks": "three ranks",
    "Trainer": "Trainer",
}
"""The section of each kind of training in `processes.py`: DDP and FSDP2 agree bit for bit."""


def runs_of(kind: str, runs: list[str]) -> list[str]:
    """Those of `runs` that a kind of training has."""
    if "three" in kind:
        return ["AdamW kahan"]
    if kind == "one process" or len(runs) == len(RUNS):
        return runs
    return [run for run in runs if run.split()[0] in ON_RANKS]


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def write(found: dict[str, Any]) -> None:
    """As JSON with one line per training or model."""
    sections = []
    for section, entries in found.items():
        if isinstance(entries, dict):
            lines = (
                f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in entries.items()
            )
            sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            sections.append(f" {json.dumps(section)}: {json.dumps(entries)}")
    FILE.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def in_this_process(run: str, backend: str) -> dict[str, Any]:
    """Digests of one algorithm and mode on one backend: of all steps, and of the saved state dict."""
    algorithm, mode = run.split()
    return {
        "steps": steps.record(algorithm, mode, backend),
        "checkpoints": steps.record_checkpoint(algorithm, mode, backend),
    }


def in_other_processes(runs: list[str] = RUNS) -> dict[str, Any]:
    """Trainings with accelerate and Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        done = forkserver.run(PROCESSES, [str(file), *runs], timeout=280)
        if done.returncode:
            raise RuntimeError(f"{PROCESSES.name} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        return json.loads(file.read_text())


def record() -> dict[str, Any]:
    """Everything, stepped by the native backend."""
    runs = {run: in_this_process(run, "native") for run in RUNS}
    apart = in_other_processes()
    sections = {section: apart[kind] for kind, section in reversed(SECTIONS.items())}
    if different := list(differences_apart(sections, apart)):
        raise RuntimeError("FSDP2 and DDP differ:\n" + "\n".join(different))
    return {
        "optimizer names": list(hf_lowprec.OPTIMIZER_NAMES),
        "steps": {run: runs[run]["steps"] for run in RUNS},
        "checkpoints": {run: runs[run]["checkpoints"] for run in RUNS},
        "state dicts": {run: steps.record_layout(*run.split()) for run in RUNS},
        "cast_model": {name: casting.record(name) for name in casting.MODELS},
        **{section: sections[section] for section in dict.fromkeys(SECTIONS.values())},
    }


def differences_apart(recorded: dict[str, Any], found: dict[str, Any], runs: list[str] = RUNS) -> Iterator[str]:
    """Of what `in_other_processes` has found."""
    for kind, section in SECTIONS.items():
        of_kind = runs_of(kind, runs)
        entries = of_kind if kind != "Trainer" else trainer.entries(of_kind)
        wanted = {run: case for run, case in recorded[section].items() if run in entries}
        yield from differences(wanted, found[kind], kind)


def differences(recorded: Any, found: Any, where: str = "") -> Iterator[str]:
    """A line for each entry that differs, or that only one of the two has."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*recorded, *found]):
            place = f"{where} / {key}" if where else key
            if key not in found:
                yield f"{place}: recorded, and not there now"
            elif key not in recorded:
                yield f"{place}: new, not in the recording"
            else:
                yield from differences(recorded[key], found[key], place)
    elif recorded != found:
        yield f"{where}: recorded {recorded!r}, now {found!r}"
