"""Runs the cases of experiments, keeps what is done, and records machine and versions.

An experiment's record is one JSON file. Apart from `seconds`, the same seeds give the same file on the same machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results" / "evidence"
CACHE = Path(__file__).resolve().parents[2] / ".evidence"
"""Checkpoints and weights, which are too large to be kept in the repository."""
SIZES = ("hour", "night", "full")
"""What all experiments together take: an hour or a night on two cores, days on a real machine."""
CHECKPOINT_EVERY = 120
"""Seconds."""


@dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it.

    Attributes:
        name: of its record.
        settings: a dataclass for each of `SIZES`; a size that is missing is that before it.
        cases: the names of the runs, in the order in which they are begun.
        needs: the names of the cases whose checkpoints a case begins with.
        run: runs a case; takes its name, the settings and its `Workspace`, and returns JSON data.
        compare: what cases say together; takes the settings, the workspace and the results, and returns JSON data in
            dictionaries by name and case.
        section: the part of the page that a record gives, a `page.Section`.
    """

    name: str
    settings: dict[str, Any]
    cases: Callable[[Any], list[str]]
    needs: Callable[[str], list[str]]
    run: Callable[[str, Any, Workspace], dict[str, Any]]
    compare: Callable[[Any, Workspace, dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]
    section: Callable[[dict[str, Any]], Any]

    def size(self, size: str) -> str:
        """The largest size up to `size` for which there are settings."""
        return [each for each in SIZES[: SIZES.index(size) + 1] if each in self.settings][-1]


class Workspace:
    """The folder of one experiment with its settings: checkpoints of running cases, and results of those that are done.

    Args:
        folder: where.
        progress: is called with a line of text.
        data: a folder of text files; None takes what is installed.
    """

    def __init__(self, folder: Path, progress: Callable[[str], None], data: Path | None) -> None:
        self.folder, self.progress, self.data = folder, progress, data
        folder.mkdir(parents=True, exist_ok=True)
        self.recorded: dict[str, dict[str, Any]] = {}
        self._saved = time.monotonic()

    def path(self, case: str, ending: str) -> Path:
        """A file of a case."""
        return self.folder / f"{case}.{ending}"

    def is_due(self) -> bool:
        """Return whether it is time to save a checkpoint."""
        return time.monotonic() - self._saved >= CHECKPOINT_EVERY

    def save(self, case: str, checkpoint: Any) -> None:
        """Replace the checkpoint of a case."""
        path = self.path(case, "pt")
        torch.save(checkpoint, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        self._saved = time.monotonic()

    def load(self, case: str) -> Any:
        """The last checkpoint of a case; None if there is none."""
        path = self.path(case, "pt")
        return torch.load(path, weights_only=False) if path.exists() else None

    def result(self, case: str) -> dict[str, Any] | None:
        """The result of a case that is done, here or in the record."""
        path = self.path(case, "json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else self.recorded.get(case)

    def has_ended(self, case: str) -> bool:
        """Return whether the case was run to its end in this folder, so that its last checkpoint is here too."""
        return self.path(case, "json").exists()

    def is_running(self, case: str) -> bool:
        """Return whether another process is running the case."""
        try:
            process = int(self.path(case, "lock").read_text(encoding="utf-8"))
            os.kill(process, 0)
        except (OSError, ValueError):
            return False
        return process != os.getpid()

    def claim(self, case: str) -> bool:
        """Claim the case for this process; False if another process is running it."""
        if self.is_running(case):
            return False
        self.path(case, "lock").write_text(str(os.getpid()), encoding="utf-8")
        return True


def machine() -> dict[str, Any]:
    """The processor, the number of threads, and the versions of Python and packages."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "hf_lowprec", "numpy")},
    }


def run(
    experiment: Experiment,
    size: str,
    cases: list[str] | None = None,
    output: Path | None = None,
    data: Path | None = None,
) -> dict[str, Any]:
    """Run the cases that are not done, and write the record of those that are; returns the record.

    Several processes may run the same experiment: each takes the next case that nobody runs.

    Args:
        experiment: the experiment.
        size: one of `SIZES`.
        cases: names of those to run; None means all.
        output: the folder of records and workspaces; None means `RESULTS` and `CACHE`.
        data: see `Workspace`.
    """
    size = experiment.size(size)
    settings = experiment.settings[size]
    results, cache = (RESULTS, CACHE) if output is None else (output, output / "checkpoints")
    start = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - start:7.0f} s] {experiment.name}: {line}", file=sys.stderr, flush=True)

    work = Workspace(cache / f"{experiment.name}-{size}", progress, data)
    path = results / f"{experiment.name}-{size}.json"
    description = json.loads(json.dumps({"experiment": experiment.name, "size": size, "settings": asdict(settings)}))
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    check_settings(work, description["settings"])
    if earlier.items() >= description.items():
        work.recorded = earlier["cases"]
    names = experiment.cases(settings)
    if unknown := set(cases or ()) - set(names):
        raise SystemExit(f"--cases: {experiment.name} has no {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    asked = [case for case in cases or names if work.result(case) is None]
    needed = [need for case in asked for need in experiment.needs(case) if not work.has_ended(need)]
    left = list(dict.fromkeys(needed + asked))
    while left := [case for case in left if not work.has_ended(case)]:
        ready = (case for case in left if all(map(work.has_ended, experiment.needs(case))))
        case = next(filter(work.claim, ready), None)
        if case is None:
            time.sleep(5)
            continue
        begun = time.monotonic()
        result = {**experiment.run(case, settings, work), "machine": machine()}
        result["seconds"] = round(time.monotonic() - begun)
        work.path(case, "json").write_text(json.dumps(result), encoding="utf-8")
        if not any(case in experiment.needs(other) for other in names):
            work.path(case, "pt").unlink(missing_ok=True)
        progress(f"{case} is done")
    # What another environment has measured stays, if cases depend on installed packages.
    found = {case: work.result(case) for case in dict.fromkeys([*names, *work.recorded])}
    done = {case: result for case, result in found.items() if result is not None}
    known = earlier.get("compared", {})  # of files that are gone
    compared = {key: known.get(key, {}) | new for key, new in experiment.compare(settings, work, done).items()}
    record = {**description, "compared": compared, "cases": done}
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def check_settings(work: Workspace, settings: dict[str, Any]) -> None:
    """Raise SystemExit if the workspace has results of other settings."""
    path, now = work.folder / "settings", json.dumps(settings, indent=1)
    if path.exists() and path.read_text(encoding="utf-8") != now:
        raise SystemExit(f"{work.folder} has results of other settings; delete it, or name another --output")
    path.write_text(now, encoding="utf-8")
