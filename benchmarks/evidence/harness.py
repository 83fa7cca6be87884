"""Runs the cases of experiments, keeps what is done, and records machine and versions.

An experiment's record is one JSON file. Apart from times, the same seeds give the same file on the same machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.checkout import commit

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
        settings: a dataclass for each of `SIZES`; a missing size falls back to the next smaller one.
        cases: the names of the runs, in the order in which they are begun.
        run: runs a case; takes its name, the settings and its `Workspace`, and returns JSON data.
        section: the part of the page that a record gives, a `page.Section`.
        reference: pattern of the cases with which a case is compared; they run whenever it does.
        needs: the names of the cases whose checkpoints a case begins with.
        alone: the case that runs when no other does.
        on_gpus: whether cases can run on a GPU.
        missing: says what has to be installed; empty if nothing has.
        compare: what cases say together; takes the settings, the workspace and the results, and returns JSON data in
            dictionaries by name and case.
    """

    name: str
    settings: dict[str, Any]
    cases: Callable[[Any], list[str]]
    run: Callable[[str, Any, Workspace], dict[str, Any]]
    section: Callable[[dict[str, Any]], Any]
    _: KW_ONLY
    reference: Callable[[str], str] = lambda case: ""
    needs: Callable[[str], list[str]] = lambda case: []
    alone: str = ""
    on_gpus: bool = False
    missing: Callable[[], str] = lambda: ""
    compare: Callable[[Any, Workspace, dict[str, dict[str, Any]]], dict[str, dict[str, Any]]] = lambda *_: {}

    def size(self, size: str) -> str:
        """The largest size up to `size` for which there are settings."""
        return [each for each in SIZES[: SIZES.index(size) + 1] if each in self.settings][-1]


@dataclass
class Workspace:
    """The folder of one experiment with its settings: checkpoints of running cases, and results of those that are done.

    Attributes:
        folder: where.
        progress: is called with a line of text.
        data: a folder of text files; None takes what is installed.
        device: the type of device to train on.
    """

    folder: Path
    progress: Callable[[str], None]
    data: Path | None
    device: str = "cpu"
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    _locks: dict[str, TextIO] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begun = self._saved = time.monotonic()

    def path(self, case: str, ending: str) -> Path:
        """A file of a case."""
        return self.folder / f"{case}.{ending}"

    def is_due(self) -> bool:
        """Return whether it is time to save a checkpoint."""
        return time.monotonic() - self._saved >= CHECKPOINT_EVERY

    def begin(self, case: str) -> None:
        """Count the seconds of the case from now on, and from those in its checkpoint."""
        path = self.path(case, "seconds")
        self._begun = time.monotonic() - (float(path.read_text(encoding="utf-8")) if path.exists() else 0)

    def seconds(self) -> float:
        """What the running case has taken, before interruptions included."""
        return time.monotonic() - self._begun

    def save(self, case: str, checkpoint: Any) -> None:
        """Replace the checkpoint of a case."""
        path = self.path(case, "pt")
        torch.save(checkpoint, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        replace_text(self.path(case, "seconds"), str(self.seconds()))
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

    def claim(self, case: str) -> bool:
        """Claim the case for this process, until it ends; False if another process has it."""
        lock = self.path(case, "lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._locks[case] = lock
        return True

    def release(self, case: str) -> None:
        """Let others see that the case has ended."""
        self._locks.pop(case).close()


def replace_text(path: Path, text: str) -> None:
    """Write a file that others may read meanwhile."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def machine(device: str) -> dict[str, Any]:
    """The processor, the number of threads, the GPU if it is used, versions of Python and packages, and the commit."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **({} if device == "cpu" else {"gpu": torch.cuda.get_device_name()}),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "hf_lowprec", "numpy")},
        "commit": commit(),
    }


def run(
    experiment: Experiment,
    size: str,
    patterns: list[str] | None = None,
    output: Path | None = None,
    data: Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run the cases that are not done, and write the record of those that are; returns the record.

    Several processes may run the same experiment: each takes the next case that nobody runs.

    Args:
        experiment: the experiment.
        size: one of `SIZES`.
        patterns: of the cases to run, as of file names; None means all.
        output: the folder of records and workspaces; None means `RESULTS` and `CACHE`.
        data: see `Workspace`.
        device: see `Workspace`.
    """
    if device != "cpu" and not experiment.on_gpus:
        raise SystemExit(f"--device {device}: {experiment.name} runs on a CPU only")
    if missing := experiment.missing():
        raise SystemExit(f"{experiment.name}: {missing}")
    size = experiment.size(size)
    settings = experiment.settings[size]
    results, cache = (RESULTS, CACHE) if output is None else (output, output / "checkpoints")
    start = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - start:7.0f} s] {experiment.name}: {line}", file=sys.stderr, flush=True)

    where = {} if device == "cpu" else {"device": device}
    work = Workspace(cache / "-".join([experiment.name, size, *where.values()]), progress, data, device)
    path = results / f"{experiment.name}-{size}.json"
    description = {"experiment": experiment.name, "size": size, **where}
    description |= json.loads(json.dumps({"settings": asdict(settings)}))
    check_settings(work, description["settings"])
    known = {}
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if (other := earlier.get("device", "cpu")) != device:
            raise SystemExit(f"{path} was measured with --device {other}; name another --output")
        if earlier.items() >= description.items():
            work.recorded, known = earlier["cases"], earlier["compared"]
    names = experiment.cases(settings)
    asked = [case for case in chosen(names, patterns, experiment) if work.result(case) is None]
    needed = [need for case in asked for need in experiment.needs(case) if not work.has_ended(need)]
    left = list(dict.fromkeys(needed + asked))
    while left := [case for case in left if not work.has_ended(case)]:
        ready = (
            case
            for case in left
            if all(map(work.has_ended, experiment.needs(case))) and (case != experiment.alone or len(left) == 1)
        )
        case = next(filter(work.claim, ready), None)
        if case is None:
            time.sleep(1)  # others run them
            continue
        if not work.has_ended(case):  # by another process, just before it was claimed
            work.begin(case)
            result = {**experiment.run(case, settings, work), "machine": machine(device)}
            check_text(result, work, names)
            result["seconds"] = round(work.seconds())
            replace_text(work.path(case, "json"), json.dumps(result))
            work.path(case, "seconds").unlink(missing_ok=True)
            if not any(case in experiment.needs(other) for other in names):
                work.path(case, "pt").unlink(missing_ok=True)
            progress(f"{case} is done")
        work.release(case)
    # What another environment has measured stays, if cases depend on installed packages.
    found = {case: work.result(case) for case in dict.fromkeys([*names, *work.recorded])}
    done = {case: result for case, result in found.items() if result is not None}
    compared = {key: known.get(key, {}) | new for key, new in experiment.compare(settings, work, done).items()}
    record = {**description, "compared": compared, "cases": done}
    results.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1) + "\n")
    return record


def chosen(names: list[str], patterns: list[str] | None, experiment: Experiment) -> list[str]:
    """The cases that match one of the patterns, and those with which they are compared; all without patterns."""
    if patterns is None:
        return names
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise SystemExit(f"--cases: {experiment.name} has no {pattern}; it has {', '.join(names)}")
    asked = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    patterns = [*patterns, *map(experiment.reference, asked)]
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def check_text(result: dict[str, Any], work: Workspace, names: list[str]) -> None:
    """Raise SystemExit if other cases were trained on another text."""
    texts = {other["text"] for other in map(work.result, names) if other and "text" in other}
    if "text" in result and texts - {result["text"]}:
        raise SystemExit(
            f"{work.folder.name}: other cases were trained on another text; it is that of the running Python, or "
            "--data-dir. Name another --output"
        )


def check_settings(work: Workspace, settings: dict[str, Any]) -> None:
    """Raise SystemExit if the workspace has results of other settings."""
    path, now = work.folder / "settings", json.dumps(settings, indent=1)
    if not path.exists():
        replace_text(path, now)
    if path.read_text(encoding="utf-8") != now:
        raise SystemExit(f"{work.folder} has results of other settings; delete it, or name another --output")
