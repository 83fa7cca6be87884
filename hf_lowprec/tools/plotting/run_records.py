"""The records of a training run, read from hf_lowprec's metrics file or from Trainer's own state.

Both give the same records, with the names of the metrics file: one dictionary per logged step, and one about the run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.metrics_file import METRICS_NAME, read_metrics

TRAINER_STATE = "trainer_state.json"

_FROM_TRAINER = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss")
"""Keys that Trainer's entries and ours have in common."""

_PRECISION_FROM_TRAINER = {
    "lost_updates": ("all", "lost_updates"),
    "lost_second_moment": ("all", "lost_second_moment"),
    "lost_weight_decay": ("all", "lost_weight_decay"),
    "norms_never_moved": ("norms", "never_moved"),
}
"""Part of the model and measure by the key that Trainer logs."""


@dataclass(frozen=True)
class RunRecords:
    """The records in one file.

    Attributes:
        source: the file.
        run: the last record about the run, `{}` if there is none.
        steps: the records of logged steps, in ascending order.
        notes: sentences about what is missing or was skipped.
    """

    source: Path
    run: dict[str, Any]
    steps: list[dict[str, Any]]
    notes: list[str]


def read_records(path: Path) -> RunRecords:
    """Read what a run has logged.

    Args:
        path: the run's folder, one of its checkpoints, or a file. In a folder, the metrics file is read; if there is
            none, the trainer state of the folder or of its newest checkpoint, whichever went further.

    Raises:
        InputError: there is no such path, nothing was logged, or the file cannot be read.
    """
    try:
        if not path.exists():
            raise InputError(f"there is no file or folder {str(path)!r}")
        found = [_read_file(file) for file in (_sources(path) if path.is_dir() else [path])]
    except OSError as error:
        raise InputError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    return max(found, key=lambda records: records.steps[-1]["step"])


def _sources(folder: Path) -> list[Path]:
    """The files of a folder that may tell what its run logged; the one with more in it first."""
    if (folder / METRICS_NAME).is_file():
        return [folder / METRICS_NAME]
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    places = [path for _, path in sorted(numbered, reverse=True)]
    in_checkpoints = [place / name for place in places for name in (METRICS_NAME, TRAINER_STATE)]
    found = [file for file in in_checkpoints if file.is_file()][:1]
    found += [folder / TRAINER_STATE] if (folder / TRAINER_STATE).is_file() else []
    if not found:
        raise InputError(
            f"{folder} contains neither {METRICS_NAME} nor {TRAINER_STATE}, nor a checkpoint-… folder that does; "
            f"name the output_dir of a training run{_runs_below(folder)}"
        )
    return found


_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def _runs_below(folder: Path) -> str:
    """The end of a message that names up to three runs in a folder's subfolders."""
    names = (METRICS_NAME, TRAINER_STATE, f"checkpoint-*/{TRAINER_STATE}")
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and any(any(path.glob(n)) for n in names))
    return f", such as {' '.join(map(str, inside[:3]))}" if inside else ""


def _read_file(file: Path) -> RunRecords:
    records = _trainer_records(file) if file.suffix == ".json" else _metrics_records(file)
    if not records.steps:
        raise InputError(
            f"{file} contains no logged step: a run logs every logging_steps steps, so wait for the first, or lower "
            "logging_steps"
        )
    return records


def _metrics_records(file: Path) -> RunRecords:
    """Records of a metrics file. After a resume, the later part of the run replaces what it repeats."""
    try:
        parts, notes = read_metrics(file)
    except ValueError as error:
        raise InputError(str(error)) from None
    steps: dict[int, dict[str, Any]] = {}
    for part in parts:
        first = part.steps[0].step if part.steps else math.inf
        steps = {earlier: kept for earlier, kept in steps.items() if earlier < first}
        for record in part.steps:
            steps[record.step] = {**steps.get(record.step, {}), "step": record.step, **record.logged}
            if record.measured is not None:
                measured = {"worst": record.measured.worst, "findings": record.measured.findings}
                steps[record.step] |= {"precision": record.measured.by_kind, **measured}
    run = asdict(parts[-1].run) if parts else {}
    return RunRecords(file, run, [steps[step] for step in sorted(steps)], notes)


def _trainer_records(file: Path) -> RunRecords:
    """Records of the `log_history` of a trainer state."""
    try:
        state = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not complete JSON ({error}); name another checkpoint of the run") from None
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{file} is not a trainer state: it has no log_history. Name a {TRAINER_STATE} or a run")
    steps: dict[int, dict[str, Any]] = {}
    for entry in history:
        if isinstance(entry, dict) and _is_step(entry.get("step")):
            record = {key: entry[key] for key in _FROM_TRAINER if key in entry}
            for key, (part, measure) in _PRECISION_FROM_TRAINER.items():
                if key in entry:
                    record.setdefault("precision", {}).setdefault(part, {})[measure] = entry[key]
            if record.keys() - {"step", "epoch"}:  # the summary at the end of training has nothing else
                steps[entry["step"]] = {**steps.get(entry["step"], {}), **record}
    return RunRecords(file, {}, [steps[step] for step in sorted(steps)], [])


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
