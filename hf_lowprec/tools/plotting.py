"""One picture of what training runs have logged: loss, lost updates by part of the model, learning rate."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from matplotlib.figure import Figure

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, read_json

TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FEW = 16
"""Lines with at most so many points have markers."""

Log = Sequence[Mapping[str, Any]]
"""The entries of Trainer's `log_history`."""


def read_log(path: Path) -> Log:
    """Read what a run has logged.

    Args:
        path: a `trainer_state.json`, a checkpoint, or the output folder of a run, whose newest checkpoint is read
            unless the folder has a `trainer_state.json` itself.

    Raises:
        ValueError: there is no such file, it is damaged, or it has nothing that is drawn.
    """
    if not path.exists():
        raise InputError(f"there is no file or folder {str(path)!r}")
    file = _trainer_state_in(path) if path.is_dir() else path
    history = read_json(file).get("log_history")
    if not isinstance(history, list):
        raise InputError(f"{file} is not a Trainer's state: it has no log_history")
    entries = [entry for entry in history if isinstance(entry, dict)]
    if not any(_points(entries, name) for _, name, _ in _PANELS):
        raise InputError(f"{file} has no logged step: Trainer logs every logging_steps steps, so lower logging_steps")
    return entries


def _trainer_state_in(folder: Path) -> Path:
    numbered = [(int(found[1]), path) for path in folder.iterdir() if (found := _CHECKPOINT.fullmatch(path.name))]
    places = [folder, *(path for _, path in sorted(numbered, reverse=True))]
    file = next((place / TRAINER_STATE for place in places if (place / TRAINER_STATE).is_file()), None)
    if file is None:
        raise InputError(
            f"{folder} has no {TRAINER_STATE}, nor a checkpoint-… folder that has one; name the output_dir of a run "
            "that has saved a checkpoint"
        )
    return file


class _Line(NamedTuple):
    label: str
    points: list[tuple[float, float]]
    color: str


_PANELS = (
    ("Loss", "loss", "training"),
    ("Lost updates: share of the weight changes that rounding lost", "lost_updates", "all weights"),
    ("Learning rate", "learning_rate", "learning rate"),
)
"""The title of each panel, the name of its number in the log, and what that is called where there are others."""


def draw(logs: Mapping[str, Log]) -> Figure:
    """Draw a panel for each quantity that any of the runs has logged.

    Args:
        logs: the runs by name. They share the axes.
    """
    panels = [(title, lines) for title, name, what in _PANELS if (lines := _lines(logs, name, what))]
    figure = Figure(figsize=(8, 2.5 * len(panels)), layout="constrained")
    for ax, (title, lines) in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True):
        ax.set_title(title, loc="left", fontsize="medium")
        for line in lines:
            marker = "o" if len(line.points) <= _FEW else None
            ax.plot(*zip(*line.points, strict=True), label=line.label, color=line.color, marker=marker, markersize=3)
        if len(lines) > 1:
            for text in ax.legend(frameon=False, fontsize="small").get_texts():
                text.set_parse_math(False)  # names of folders may contain dollar signs
        ax.spines[["top", "right"]].set_visible(False)
        if title.startswith("Lost"):
            ax.set_ylim(-0.1, 1.1)
    ax.set_xlabel("step")
    return figure


def _lines(logs: Mapping[str, Log], name: str, what: str) -> list[_Line]:
    """The lines of one panel: those of the runs, each in its colour, then evaluations or parts of the model."""
    main, others, colors = [], [], count(len(logs))
    for k, (run, entries) in enumerate(logs.items()):
        prefix = f"{run}: " if len(logs) > 1 else ""
        if points := _points(entries, name):
            main.append(_Line(prefix + what, points, f"C{k}"))
        if name == "loss" and (points := _points(entries, "eval_loss")):
            others.append(_Line(prefix + "evaluation", points, f"C{next(colors)}"))
        parts = {key for entry in entries for key in entry if key.startswith(f"{name}/")}
        for part in sorted(parts):
            # A part is logged where it has clearly lost something, and counts as 0 elsewhere.
            filled = [{part: 0.0, **entry} for entry in entries if name in entry]
            others.append(_Line(prefix + part.partition("/")[2], _points(filled, part), f"C{next(colors)}"))
    return main + others


def _points(entries: Log, name: str) -> list[tuple[float, float]]:
    """The logged values of a number with their steps; what is not a finite number is left out."""
    points = ((entry.get("step"), entry.get(name)) for entry in entries)
    return [(step, value) for step, value in points if _is_finite(step) and _is_finite(value)]


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int) and abs(value) <= sys.float_info.max
