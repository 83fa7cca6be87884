"""Training runs as the plots see them: named, with every logged quantity as a series over steps."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.metrics_file import METRICS_NAME
from hf_lowprec.tensor_names import PARAMETER_KINDS
from hf_lowprec.tools.plotting.run_records import TRAINER_STATE, RunRecords, read_records

ALL = "all"
"""The name, next to those of the kinds, under which records hold the values of all weights together."""


UNCERTAIN = 0.5 / 3
"""A share with a larger standard error is not drawn: at three of them, half of all may be lost where nothing is."""


@dataclass(frozen=True)
class Series:
    """Values of one quantity, by optimizer step, with standard errors; NaN where a value or an error is unknown."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(map(math.isfinite, self.values))

    @property
    def last(self) -> tuple[float, float]:
        """The last finite value and its error; NaNs if there is none."""
        return next((p for p in zip(self.values[::-1], self.errors[::-1], strict=True) if math.isfinite(p[0])), _NONE)


_NONE = (math.nan, math.nan)

_NUMBER = re.compile(r"(?<![\w.])[\d.,]*\d(e-?\d+)?")
"""A number in a sentence; not one in a parameter's name, such as `layers.0`."""


@dataclass(frozen=True)
class LoggedFinding:
    """A sentence of the log, and the first and the last step at which it appears."""

    message: str
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: tells it apart from the others.
        records: what it logged.
    """

    name: str
    records: RunRecords

    @property
    def last_step(self) -> int:
        return self.records.steps[-1]["step"]

    def logged(self, key: str) -> Series:
        """A number that the records have under `key`, such as `loss`."""
        found = Series()
        for record in self.records.steps:
            if key in record:
                _append(found, record["step"], record[key], None)
        return found

    def measured(self, kind: str, measure: str) -> Series:
        """A number about the precision of one kind of parameters, or of `all`."""
        return self._precision.get(kind, {}).get(measure, Series())

    def drawn(self, kind: str, measure: str) -> Series:
        """The series `measured`, or an empty one if the median of its errors is above `UNCERTAIN`."""
        found = self.measured(kind, measure)
        errors = [error for error in found.errors if math.isfinite(error)]
        return Series() if errors and median(errors) > UNCERTAIN else found

    @cached_property
    def _precision(self) -> dict[str, dict[str, Series]]:
        """By kind and measure."""
        found: dict[str, dict[str, Series]] = {}
        for record in self.records.steps:
            for kind, values in _mapping(record.get("precision")).items():
                series = found.setdefault(kind, {})
                for measure, value in _mapping(values).items():
                    error = values.get(f"{measure}_error")
                    _append(series.setdefault(measure, Series()), record["step"], value, error)
        return found

    def kinds(self) -> list[str]:
        """`all` and the kinds about which something was measured, in the order of a model."""
        return _in_order(set(self._precision))

    def has_bf16_weights(self) -> bool:
        parts = _mapping(self.records.run.get("kinds")).values()
        return any("bfloat16" in _mapping(_mapping(part).get("dtypes")) for part in parts)

    def worst_tensors(self) -> dict[str, list[tuple[str, float]]]:
        """The worst tensors by name, per measure, of the last record that has them."""
        found: Any = next((record["worst"] for record in reversed(self.records.steps) if record.get("worst")), {})
        pairs = {measure: [p for p in rows if _is_pair(p)] for measure, rows in _mapping(found).items() if rows}
        return {measure: [(str(name), _as_float(value)) for name, value in rows] for measure, rows in pairs.items()}

    def findings(self) -> list[LoggedFinding]:
        """The findings in the log. Sentences that differ in numbers only are one: the last of them."""
        found: dict[str, LoggedFinding] = {}
        for record in self.records.steps:
            messages = record.get("findings")
            for message in messages if isinstance(messages, list) else ():
                key = _NUMBER.sub("", str(message))
                first = found[key].first_step if key in found else record["step"]
                found[key] = LoggedFinding(str(message), first, record["step"])
        return list(found.values())

    def notes(self) -> list[str]:
        """Sentences about what the plots cannot show of this run."""
        notes = [*self.records.notes]
        for key, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            series = self.logged(key)
            missing = [s for s, v in zip(series.steps, series.values, strict=True) if not math.isfinite(v)]
            if missing:
                notes.append(f"The {what} is not finite in {len(missing)} of {len(series.steps)} logs, first at step "
                             f"{missing[0]}.")  # fmt: skip
        if not self.kinds():
            notes.append(
                "Nothing was logged about precision: the run trained in FP32, without hf_lowprec, or only its "
                "trainer_state.json was found."
            )
        return notes


def load_runs(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Run]:
    """Read several runs.

    Args:
        paths: as `read_records` takes them.
        labels: their names, as many as there are paths. By default, the part in which the paths differ.

    Raises:
        InputError: a path cannot be read or is given twice, or the labels do not fit.
    """
    if labels and len(labels) != len(paths):
        raise InputError(f"{_count(labels, 'label')} for {_count(paths, 'run')}: give --label once per run, in order")
    names = list(labels) or distinguishing_names([_folder_of(path).resolve() for path in paths])
    records = [read_records(path) for path in paths]
    seen: dict[Path, Path] = {}
    for path, found in zip(paths, records, strict=True):
        if (first := seen.setdefault(found.source.resolve(), path)) is not path:
            raise InputError(f"{path} is the same run as {first}: both are read from {found.source}. Name it once")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"--label {min(twice)!r} names two runs; give each its own")
    return [Run(name, found) for name, found in zip(names, records, strict=True)]


def kinds_of_all(runs: Sequence[Run]) -> list[str]:
    """`all` and the kinds about which something was measured in any of the runs, in the order of a model."""
    return _in_order({kind for run in runs for kind in run.kinds()})


def distinguishing_names(paths: Sequence[Path]) -> list[str]:
    """The part of each path in which it differs from the others; of a single path, its last part."""
    parts = [path.parts for path in paths]
    while len({p[0] for p in parts}) == 1 and all(len(p) > 1 for p in parts):
        parts = [p[1:] for p in parts]
    while len({p[-1] for p in parts}) == 1 and all(len(p) > 1 for p in parts):
        parts = [p[:-1] for p in parts]
    return ["/".join(p) for p in parts]


def _folder_of(path: Path) -> Path:
    """The folder after which a run is called, if its metrics file or trainer state was named."""
    return path.parent if path.name in (METRICS_NAME, TRAINER_STATE) else path


def _in_order(kinds: set[str]) -> list[str]:
    known = [kind for kind in (ALL, *PARAMETER_KINDS) if kind in kinds]
    return known + sorted(kinds.difference(known))


def _append(series: Series, step: int, value: Any, error: Any) -> None:
    series.steps.append(step)
    series.values.append(_as_float(value))
    series.errors.append(_as_float(error))


def _as_float(value: Any) -> float:
    """A value of a log; NaN for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return math.nan
    return float(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _count(items: Sequence[Any], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
