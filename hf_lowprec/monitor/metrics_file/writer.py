"""Writes a metrics file while a run trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from hf_lowprec.monitor.metrics_file.reader import RunPart
from hf_lowprec.monitor.metrics_file.records import METRICS_NAME, RunRecord, StepRecord


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
