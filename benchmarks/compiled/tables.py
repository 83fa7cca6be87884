"""Tables of registers, memory accesses and instructions, from what `compiled_step.py` has recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
VERSION_TARGETS = ("sm_90", "sm_100")
"""Of the table that compares versions of Triton."""


def tables(rows: list[Row]) -> str:
    """Counts by target, by pipe and by version of Triton; the first version that was recorded is that of the others."""
    versions = list(dict.fromkeys(row["triton"] for row in rows))
    latest = [row for row in rows if row["triton"] == versions[0]]
    parts = [by_target(latest), by_pipe(latest, "sm_90")]
    if len(versions) > 1:
        parts.append(by_version(rows, versions))
    return "\n\n".join(parts)


def by_target(rows: list[Row]) -> str:
    """Registers, warps and instructions per element of each kernel, for every target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    head = ["kernel", "launches", f"accesses of a thread, {targets[0]}", f"registers: {', '.join(targets)}"]
    lines = _head([*head, "warps that fit", "instructions per element"])
    for name, found in _by_kernel(rows).items():
        of_all: list[Callable[[Row], str]] = [
            lambda row: str(row["registers"]),
            lambda row: str(row["warps"]),
            lambda row: f"{row['hot'] + row['outside']:.0f}",
        ]
        cells = [", ".join(show(found[target]) for target in targets if target in found) for show in of_all]
        first = found[targets[0]]
        lines.append(f"| {name} | {first['launches']} | {first['accesses']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_pipe(rows: list[Row], target: str) -> str:
    """Operations per element on one target, by the pipe that executes them."""
    lines: list[str] = []
    for name, found in _by_kernel(rows).items():
        if (row := found.get(target)) is None:
            continue
        pipes = row["by_pipe"]
        if not lines:
            lines = _head([f"kernel, {target}", "all instructions", *pipes, "with all slow paths"])
        cells = [row["hot"] + row["outside"], *pipes.values(), row["longest"] + row["outside"]]
        lines.append(f"| {name} | {' | '.join(f'{count:.1f}' for count in cells)} |")
    return "\n".join(lines)


def by_version(rows: list[Row], versions: list[str]) -> str:
    """Registers and instructions per element by version of Triton."""
    columns = [f"{target}, {what}" for target in VERSION_TARGETS for what in ("registers", "instructions")]
    lines = _head([f"kernel; Triton {', '.join(versions)}", *columns])
    for name in _by_kernel(rows):
        cells = []
        for target in VERSION_TARGETS:
            found = {row["triton"]: row for row in rows if (row["kernel"], row["target"]) == (name, target)}
            if len(found) < len(versions):
                break
            cells.append(", ".join(str(found[version]["registers"]) for version in versions))
            instructions = [found[version]["hot"] + found[version]["outside"] for version in versions]
            cells.append(", ".join(f"{count:.0f}" for count in instructions))
        else:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]


def _by_kernel(rows: list[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["kernel"], {})[row["target"]] = row
    return found
