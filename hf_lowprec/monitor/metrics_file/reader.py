"""Reads a metrics file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hf_lowprec.monitor.metrics_file.records import METRICS_NAME, RunRecord, StepRecord, parse


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
