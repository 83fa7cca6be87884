"""The lines of a metrics file: a run record where a run begins or is resumed, then a step record for each log.

A number that is not finite is left out, since JSON has none.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

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
