"""Writes the metrics file of a Trainer's run."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lowprec.integrations.transformers.optim_args import optimizer_name
from hf_lowprec.metrics_file import (
    METRICS_NAME,
    MeasuredPrecision,
    MetricsWriter,
    RunPart,
    RunRecord,
    StepRecord,
    parts_until,
    read_metrics,
)
from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.monitor.step_precision import LOST_SHARES, StepPrecision
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.rounding import dtype_name
from hf_lowprec.tensor_names import PARAMETER_KINDS, parameter_kinds

_SUMMARY = "train_runtime"
"""A name in the log at the end of a run, which belongs to no step."""
_TENSORS = 5
"""The number of tensors that are named for each number in which they are worst."""

logger = logging.getLogger(__name__)


class PrecisionSource(Protocol):
    """The callback that measures; it runs before those that send and write its results.

    Attributes:
        report_text: the precision report.
        precision: the precision of the step that is being logged; None if it was not measured.
        findings: what is wrong at this log.
    """

    report_text: str
    precision: StepPrecision | None
    findings: list[Finding]


class MetricsFileCallback(TrainerCallback):
    """Writes the metrics file on rank 0. A file that cannot be written does not stop training.

    Args:
        source: where the precision of each step comes from.
    """

    def __init__(self, source: PrecisionSource) -> None:
        self._source = source
        self._folder: Path | None = None
        self._checkpoint: Path | None = None
        self._writer: MetricsWriter | None = None

    def begin(self, folder: Path, checkpoint: Path | None) -> None:
        """Prepare for a run; called by `Trainer.train`.

        Args:
            folder: where the run saves its checkpoints.
            checkpoint: the checkpoint from which it is resumed, in any folder; None for a new run.
        """
        self._folder, self._checkpoint, self._writer = folder, checkpoint, None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a new file, or continue that of the checkpoint."""
        if self._folder is None or not state.is_world_process_zero:
            return
        optimizer = type(unwrap_optimizer(kwargs["optimizer"])).__name__
        run = run_record(kwargs["model"], optimizer, optimizer_name(args), self._source.report_text)
        earlier = _earlier_parts(self._folder, self._checkpoint, state.global_step) if self._checkpoint else []
        try:
            self._writer = MetricsWriter(self._folder, run, earlier)
        except OSError as error:
            self._stop_writing(error)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add a line."""
        if self._writer is None or logs is None or _SUMMARY in logs:
            return
        try:
            self._writer.append(StepRecord(state.global_step, dict(logs), measured_precision(self._source)))
        except OSError as error:
            self._stop_writing(error)

    def copy_to(self, checkpoint: Path) -> None:
        """Copy the file to a checkpoint that is being saved."""
        if self._writer is None:
            return
        try:
            self._writer.copy_to(checkpoint)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self._writer = None
        logger.warning("hf_lowprec: %s cannot be written, so it ends here; training goes on: %s", METRICS_NAME, error)


def run_record(model: nn.Module, optimizer: str, optim: str, report: str) -> RunRecord:
    """The record of what is trained, by kinds of parameters.

    Args:
        model: the model.
        optimizer: the optimizer's class.
        optim: the value of `TrainingArguments.optim`.
        report: the precision report.
    """
    parameters = dict(model.named_parameters())
    kind_of = parameter_kinds({name: full_shape(parameter) for name, parameter in parameters.items()})
    kinds: dict[str, dict[str, Any]] = {}
    for kind in PARAMETER_KINDS:
        of_kind = [parameter for name, parameter in parameters.items() if kind_of[name] == kind]
        dtypes: dict[str, int] = {}
        for parameter in of_kind:
            name = dtype_name(parameter.dtype)
            dtypes[name] = dtypes.get(name, 0) + math.prod(full_shape(parameter))
        if of_kind:
            kinds[kind] = {"tensors": len(of_kind), "parameters": sum(dtypes.values()), "dtypes": dtypes}
    total = sum(math.prod(full_shape(parameter)) for parameter in parameters.values())
    return RunRecord(type(model).__name__, optimizer, optim, total, kinds, report)


def measured_precision(source: PrecisionSource) -> MeasuredPrecision | None:
    """The numbers of the file for the step that is being logged."""
    precision = source.precision
    if precision is None:
        return None
    worst = {name: precision.worst(name, _TENSORS) for name in (*LOST_SHARES, "never_moved")}
    findings = [finding.message for finding in source.findings]
    return MeasuredPrecision(precision.by_kind, {name: found for name, found in worst.items() if found}, findings)


def _earlier_parts(folder: Path, checkpoint: Path, step: int) -> list[RunPart]:
    """The records before `step` of the run that `checkpoint` belongs to."""
    path = checkpoint / METRICS_NAME
    if not path.is_file() and checkpoint.resolve().parent == folder.resolve():
        path = folder / METRICS_NAME  # a checkpoint without a copy, of the run that wrote this file
    if not path.is_file():
        return []
    try:
        return parts_until(read_metrics(path).parts, step)
    except (OSError, ValueError) as error:
        logger.warning("hf_lowprec: the metrics of the run so far are lost, %s cannot be read: %s", path, error)
        return []
