"""One picture of what training runs have logged: loss, lost updates by part of the model, learning rate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import nan
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple, TypeGuard

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hf_lowprec.integrations.checkpoint_files.input_files import InputError, read_json

TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FEW = 16
"""Lines with at most so many points have markers."""
_WIDTH = 30
"""The characters in a row of a legend."""
_STYLES = ("-", "--", "-.", ":")
"""There are ten colours; further lines have them again, in another style."""
_LOST = "lost_updates"
_NOTHING = 0.005
"""A share of lost updates that is 0 to within half a percent."""

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
    if not any(_line(entries, name, what, 0) for _, name, what in _PANELS):
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
    """Steps and values; NaN where the line is broken."""
    color: int


_PANELS = (
    ("Loss", "loss", "training"),
    ("Lost updates: share of the weight changes that rounding lost", _LOST, "all weights"),
    ("Learning rate", "learning_rate", "training"),
)
"""The title of each panel, the name of its number in the log, and what that is called where there are others."""


def draw(logs: Mapping[str, Log]) -> Figure:
    """Draw a panel for each quantity that any of the runs has logged, or a line of text if there is nothing to see.

    Args:
        logs: the runs by name. They share the axes.
    """
    panels = [(title, name, lines) for title, name, what in _PANELS if (lines := _lines(logs, name, what))]
    texts = [_instead_of_a_panel(*panel) for panel in panels]
    # A row of a legend takes less than 0.2 inches, and so does one of such a text, but above its axes.
    heights = [
        0.02 if text else max(1.9, 0.2 * _rows(lines)) for text, (_, _, lines) in zip(texts, panels, strict=True)
    ]
    above = [0.2 * (text.count("\n") + 1) if text else 0.4 for text in texts]
    figure = Figure(figsize=(8, 0.4 + sum(heights) + sum(above)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (title, name, lines), text in zip(axes, panels, texts, strict=True):
        ax.set_title(text or title, loc="left", fontsize="small" if text else "medium", parse_math=False)
        if text:
            ax.set_axis_off()
            continue
        for line in lines:
            marked = _alone(line.points) if len(line.points) > _FEW else None
            (drawn,) = ax.plot(*zip(*line.points, strict=True), label=fill(line.label, _WIDTH), color=f"C{line.color}")
            drawn.set(marker="o", markersize=3, markevery=marked, linestyle=_STYLES[line.color // 10 % len(_STYLES)])
        if len(lines) > 1 or lines[0].label.endswith(")"):
            legend = ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
            for entry in legend.get_texts():
                entry.set_parse_math(False)  # names of folders may contain dollar signs
        ax.spines[["top", "right"]].set_visible(False)
        ax.locator_params(axis="x", integer=True)
        if name == _LOST:
            ax.yaxis.set_major_formatter(PercentFormatter(1))
            ax.update_datalim([(lines[0].points[0][0], share) for share in (0, 1)])
            ax.autoscale_view()
    if with_axes := [ax for ax in axes if ax.axison]:
        with_axes[-1].set_xlabel("step")
        with_axes[-1].tick_params(labelbottom=True)
    return figure


def _rows(lines: list[_Line]) -> int:
    """The rows of a panel's legend."""
    return sum(len(wrap(line.label, _WIDTH)) for line in lines)


def _instead_of_a_panel(title: str, name: str, lines: list[_Line]) -> str:
    """Return the text that replaces a panel whose values are all zero or not finite; empty for other panels."""
    values = [abs(value) for line in lines for _, value in line.points if _is_finite(value)]
    if values and max(values) > (_NOTHING if name == _LOST else 0):
        return ""
    found = "" if not values else "none (below 0.5%) in " if name == _LOST else "0 in "
    return fill(f"{title.partition(':')[0]}: {found}{'; '.join(line.label for line in lines)}", 2 * _WIDTH)


def _lines(logs: Mapping[str, Log], name: str, what: str) -> list[_Line]:
    """The lines of one panel: those of the runs, each in its colour, then evaluations or parts of the model."""
    main: list[_Line] = []
    others: list[_Line] = []
    for k, (run, entries) in enumerate(logs.items()):
        prefix = f"{run}: " if len(logs) > 1 else ""
        main += _line(entries, name, prefix + what, k)
        if name == "loss":
            others += _line(entries, "eval_loss", prefix + "evaluation", len(logs) + len(others))
        for part in sorted({key for entry in entries for key in entry if key.startswith(f"{name}/")}):
            # A part is logged where it has clearly lost something, and counts as 0 elsewhere.
            filled = [{part: 0.0, **entry} if name in entry else entry for entry in entries]
            others += _line(filled, part, prefix + part.partition("/")[2], len(logs) + len(others))
    return main + others


def _line(entries: Log, name: str, label: str, color: int) -> list[_Line]:
    """The line of a number; none if it was never logged.

    It is broken, and its label says why, where the number is not finite, where a log of the loss lacks it, where an
    interval is at least twice as long as those beside it, and where the log goes back to an earlier step.
    """
    found = [(entry.get("step"), entry.get(name), "loss" in entry and name != "eval_loss") for entry in entries]
    logged = [(step, value) for step, value, due in found if _is_finite(step) and (due or _is_number(value))]
    if not any(_is_number(value) for _, value in logged):
        return []
    steps = [step for step, _ in logged]
    intervals = [after - before for before, after in pairwise(steps)]
    beside = [max(0, *both) for both in zip([0, *intervals[:-1]], [*intervals[1:], 0], strict=True)]
    long = [i for i, interval in enumerate(intervals) if interval >= 2 * beside[i] > 0]
    back = [i for i, interval in enumerate(intervals) if interval < 0]
    points = []
    for i, (step, value) in enumerate(logged):
        points += [(step, nan)] * (i - 1 in long + back)
        points.append((step, value if _is_finite(value) else nan))
    notes = [
        _where("not logged at", [step for step, value in logged if not _is_number(value)]),
        _where("NaN or infinite at", [step for step, value in logged if _is_number(value) and not _is_finite(value)]),
        _between([(steps[i], steps[i + 1]) for i in long]),
        _where("resumed at", [steps[i + 1] for i in back]),
    ]
    why = "; ".join(filter(None, notes))
    return [_Line(f"{label} ({why})" if why else label, points, color)]


def _where(what: str, steps: list[float]) -> str:
    if len(steps) < 2:
        return f"{what} step {steps[0]}" if steps else ""
    return f"{what} {len(steps)} steps from {steps[0]} to {steps[-1]}"


def _between(gaps: list[tuple[float, float]]) -> str:
    count = f", {len(gaps)} times" * (len(gaps) > 1)
    return f"no logs between steps {gaps[0][0]} and {gaps[-1][1]}{count}" if gaps else ""


def _alone(points: list[tuple[float, float]]) -> list[int]:
    """The indices of points without a neighbour, which only a marker makes visible."""
    drawn = [False, *(_is_finite(value) for _, value in points), False]
    return [i for i in range(len(points)) if drawn[i : i + 3] == [False, True, False]]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int)


def _is_finite(value: Any) -> TypeGuard[float]:
    return _is_number(value) and abs(value) < 1e39  # beyond FP32, and matplotlib adds and multiplies in FP64
