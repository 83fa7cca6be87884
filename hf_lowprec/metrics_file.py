"""The log file that a training run writes to its output folder, for plots and other programs: format, writer, reader.

One JSON object per line: a run record where a run begins or is resumed, then a step record for each log. A number that
is not finite is left out, since JSON has none. Reading and writing need no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

METRICS_NAME = "hf_lowprec_metrics.jsonl"
VERSION = 1

_OWN_FIELDS = ("record", "step", "precision", "worst", "findings")
"""Fields of a step record that are not numbers of the log."""


@dataclasses.dataclass(frozen=True)
class MeasuredPrecision:
    """The precision of one optimizer step.

    Attributes:
        by_kind: a kind of parameters (see `parameter_kinds`), or "all" -> name of a number -> its value.
        worst: name of a number -> the tensors in which it is worst, with their values; worst first.
        findings: what is wrong at this step, as sentences for users.
    """

    by_kind: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    worst: Mapping[str, list[tuple[str, float]]] = dataclasses.field(default_factory=dict)
    findings: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The record of what is trained, written when a run begins and each time it is resumed.

    Attributes:
        model: the model's class.
        optimizer: the optimizer's class.
        optim: the name by which Trainer chose the optimizer.
        parameters: number of the model's parameters, frozen ones included.
        kinds: kind of parameters -> `{"tensors": count, "parameters": count, "dtypes": {dtype: parameters}}`.
        report: the precision report.
    """

    model: str
    optimizer: str
    optim: str
    parameters: int
    kinds: dict[str, dict[str, Any]]
    report: str

    def line(self) -> str:
        """The record as a line of the file."""
        return _line({"record": "run", "version": VERSION, **dataclasses.asdict(self)})


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of a logged step.

    Attributes:
        step: Trainer's global step.
        logged: the numbers of the log by name: `epoch`, `loss`, `grad_norm`, `learning_rate`, `eval_loss`, …
        measured: the precision of the step; None if it was not measured.
    """

    step: int
    logged: dict[str, float]
    measured: MeasuredPrecision | None = None

    def line(self) -> str:
        """The record as a line of the file."""
        fields: dict[str, Any] = {"record": "step", "step": self.step}
        fields |= {name: value for name, value in self.logged.items() if name not in _OWN_FIELDS and _finite(value)}
        if self.measured is not None:
            fields["precision"] = {
                kind: {name: value for name, value in values.items() if _finite(value)}
                for kind, values in self.measured.by_kind.items()
            }
            fields["worst"] = {
                name: [[tensor, value] for tensor, value in tensors if _finite(value)]
                for name, tensors in self.measured.worst.items()
            }
            fields["findings"] = list(self.measured.findings)
        return _line(fields)


def parse(line: bytes) -> RunRecord | StepRecord:
    """The record in a line of the file.

    Raises:
        ValueError: the line is not a record, or a later version wrote it.
    """
    try:
        fields = json.loads(line)
        kind = fields.pop("record")
        if kind == "run":
            if (version := fields.pop("version")) > VERSION:
                raise ValueError(f"has version {version}, but this version of hf_lowprec reads up to {VERSION}")
            return RunRecord(**{field.name: fields[field.name] for field in dataclasses.fields(RunRecord)})
        if kind == "step":
            own = {name: fields.pop(name) for name in _OWN_FIELDS if name in fields}
            worst = {name: [(tensor, value) for tensor, value in found] for name, found in own.get("worst", {}).items()}
            measured = (
                MeasuredPrecision(own["precision"], worst, own.get("findings", [])) if "precision" in own else None
            )
            return StepRecord(own["step"], fields, measured)
    except (AttributeError, KeyError, RecursionError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not a record of a metrics file ({error!r})") from error
    raise ValueError(f"is a record of the unknown kind {kind!r}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, allow_nan=False, ensure_ascii=False) + "\n"


class MetricsWriter:
    """Writes the metrics file of one run. Only one process of a run may have one.

    Every line is written by a single system call, so a killed process leaves at most one unfinished line, the last.

    Args:
        folder: the folder for the file; created if it does not exist.
        run: what is trained.
        earlier: the parts of the same run before it was resumed.

    Raises:
        OSError: the file cannot be written, here and in the methods.
    """

    def __init__(self, folder: Path, run: RunRecord, earlier: Iterable[RunPart] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_NAME
        lines = [line for part in earlier for line in (part.run.line(), *(step.line() for step in part.steps))]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join([*lines, run.line()]), encoding="utf-8")
        os.replace(temporary, self.path)  # a reader finds either the old file or the new one

    def append(self, record: StepRecord) -> None:
        """Add a line."""
        line = record.line().encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(file, line) < len(line):
                raise OSError(f"{self.path} is incomplete; is the disk full?")
        finally:
            os.close(file)

    def copy_to(self, folder: Path) -> None:
        """Copy the file to the folder of a checkpoint."""
        shutil.copyfile(self.path, folder / METRICS_NAME)


def parts_until(parts: Iterable[RunPart], step: int) -> list[RunPart]:
    """The parts of a run that continues from `step`: records of later steps are dropped."""
    kept = [RunPart(part.run, [record for record in part.steps if record.step <= step]) for part in parts]
    return [part for part in kept if part.steps]


class RunPart(NamedTuple):
    """A run up to where it ended or was resumed.

    Attributes:
        run: what was trained.
        steps: what was logged, in the order of the file. A step may occur twice: its log, and its evaluation.
    """

    run: RunRecord
    steps: list[StepRecord]


class MetricsFile(NamedTuple):
    """The content of a metrics file.

    Attributes:
        parts: the parts of one run, in order: a new one begins each time the run was resumed.
        notes: what is wrong with the file although it can be read, as sentences for users.
    """

    parts: list[RunPart]
    notes: list[str]


def read_metrics(path: Path | str) -> MetricsFile:
    """Read the metrics file of a run, or of one of its checkpoints.

    A process that is killed can leave its last line unfinished. Such a line is left out, with a note.

    Args:
        path: the file, or the folder that contains it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a metrics file, or a later version has written it. The message names file and line.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_NAME
    *lines, unfinished = path.read_bytes().split(b"\n")
    if unfinished:
        lines.append(unfinished)
    parts: list[RunPart] = []
    notes: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse(line)
        except ValueError as error:
            if unfinished and number == len(lines):
                notes.append(f"the last line of {path} is unfinished and was left out; was the run killed?")
                break
            raise ValueError(f"line {number} of {path} {error}") from error
        if isinstance(record, RunRecord):
            parts.append(RunPart(record, []))
        elif parts:
            parts[-1].steps.append(record)
        else:
            raise ValueError(f"line {number} of {path} is a step, but no run has begun before it")
    return MetricsFile(parts, notes)
