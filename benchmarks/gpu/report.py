"""The results as JSON and as Markdown, written whenever there is more of them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.training import AUTOCAST, MASTERS, OURS, PARTS, ROUNDED, WAYS

Result = dict[str, Any]
Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]
NOTES = {
    "failures": "**Failed:**",
    "peer_failures": "Optimizers of other packages that failed, and are left out:",
    "left_out": "Left out:",
}
COMPARISONS = [(way, AUTOCAST) for way in WAYS if way.startswith(OURS)]
COMPARISONS += [(f"{OURS}split", MASTERS), (f"{OURS}stochastic", ROUNDED)]
"""A way to train, and the usual one with which it is compared."""


class Report:
    """Results that are on disk at any time, so that an end from outside costs nothing that was measured."""

    def __init__(self, folder: Path, device: str, date: str) -> None:
        stem = f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{date}"
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.markdown = folder / f"{stem}.json", folder / f"{stem}.md"
        self.result: Result = {kind: [] for kind in NOTES}

    def note(self, kind: str, message: str) -> None:
        """Add to one of `NOTES`."""
        if message not in self.result[kind]:
            self.result[kind].append(message)

    def write(self) -> None:
        """Replace both files."""
        for path, text in ((self.json, json.dumps(self.result, indent=1) + "\n"), (self.markdown, render(self.result))):
            whole = path.with_name(path.name + ".part")
            whole.write_text(text, encoding="utf-8")
            whole.replace(path)


def render(result: Result) -> str:
    """All tables that there are results for."""
    machine = result.get("machine", {})
    parts = [f"# Optimizer step and training on {machine.get('gpu', 'a GPU')}"]
    if result.get("rehearsal"):
        parts.append("**A rehearsal on the CPU: no time, speed or verdict in here means anything.**")
    parts.append(_list(_facts(result)))
    for kind, title in NOTES.items():
        if result.get(kind):
            parts += [title, _list(result[kind])]
    if result.get("parity"):
        parts.append(_parity(result["parity"]))
    if result.get("step_1b"):
        parts.append(_step(result["step_1b"], result.get("launches") or {}))
    if tables := [table for table in result.get("training") or [] if table.get("rows")]:
        parts += [_comparisons(tables), *map(_training, tables)]
    return "\n\n".join(parts) + "\n"


def _facts(result: Result) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    machine = ", ".join(f"{name} {value}" for name, value in result.get("machine", {}).items() if name != "gpu")
    commit = f"commit {result['commit']}" if "commit" in result else ""
    facts = [fact for fact in (result.get("date", ""), commit, machine, versions) if fact]
    if copy := result.get("copy"):
        speed = copy["bytes_per_second"] / 1e9
        facts.append(f"a copy within device memory moves {speed:.0f} GB/s, reads and writes both counted")
    return facts


def _parity(checks: dict[str, str]) -> str:
    wrong = [f"{mode}: {found}" for mode, found in checks.items() if found != "equal"]
    return "Bits of the reference on the CPU: " + (f"**{'; '.join(wrong)}**" if wrong else "equal in every mode.")


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _table(columns: Columns, rows: list[Row]) -> str:
    return _lines([list(columns)], [[show(row) for show in columns.values()] for row in rows])


def _lines(head: list[list[str]], rows: list[list[str]]) -> str:
    rule = [["---"] + ["---:"] * (len(head[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in head + rule + rows)


def _cell(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else format(row[key], form)


def _step(table: dict[str, Any], launched: dict[str, Any]) -> str:
    columns: Columns = {
        "optimizer": _cell("optimizer", ""),
        "device ms": lambda row: f"{row['device_ms']:.3f}" + ("*" if row["waited_for_host"] else ""),
        "× FP32 fused": _cell("ratio", ".2f"),
        "GB/s": _cell("gigabytes_per_second", ".0f"),
        "of a copy": _cell("of_copy", ".2f"),
        "wall ms": _cell("wall_ms", ".3f"),
        "host ms": _cell("host_ms", ".3f"),
        "kernels": lambda row: str(launched.get(row["optimizer"], {}).get("kernels", "")),
        "state B/param": _cell("state_bytes_per_parameter", ".2f"),
        "extra MB": _cell("extra_megabytes", ".1f"),
    }
    title = (
        f"## One step of {table['model']}, {table['layers']} layers: {table['tensors']} tensors, "
        f"{table['parameters'] / 1e6:.1f} M parameters"
    )
    notes = (
        "Every tensor in the optimizer's format, norms included; gradients too. Device: from event to event behind a "
        "filled queue, with a cold L2. Wall: until the device is done, from an idle one. Host: until `step()` returns. "
        "Kernels: of one step. Extra: the peak during a step above what is allocated before it."
    )
    if any(row["waited_for_host"] for row in table["rows"]):
        notes += " *: the queue was not filled in time; waiting for the host, or for room in the queue, may be counted."
    return "\n\n".join([title, _table(columns, table["rows"]), notes])


def _comparisons(tables: list[dict[str, Any]]) -> str:
    rows = []
    for table in tables:
        ways = {row["way"]: row for row in table["rows"]}
        for way, baseline in COMPARISONS:
            if {way, baseline} <= ways.keys():
                ours, usual = ways[way], ways[baseline]
                peaks = [f"{row['peak_gigabytes']:.2f}" for row in (ours, usual)]
                rows.append([table["setting"], way, f"{usual['step_ms'] / ours['step_ms']:.2f} × {baseline}", *peaks])
    head = ["each step", "way", "tokens/s", "peak GB", "baseline's peak GB"]
    notes = "Tokens/s: the baseline's median time of a step over that of the way."
    return "\n\n".join([f"## Training {tables[0]['model']}, compared", _lines([head], rows), notes])


def _training(table: dict[str, Any]) -> str:
    def part(name: str) -> Callable[[Row], str]:
        return lambda row: f"{statistics.median(row['parts_ms'][name]):.2f}"

    columns: Columns = {
        "way": _cell("way", ""),
        "ms": _cell("step_ms", ".2f"),
        "quartiles": lambda row: " to ".join(format(each, ".2f") for each in row["quartiles_ms"]),
        **{name: part(name) for name in PARTS},
        "tokens/s": _cell("tokens_per_second", ".0f"),
        "peak GB": _cell("peak_gigabytes", ".2f"),
        "weights, gradients, state GB": _cell("non_activation_gigabytes", ".3f"),
        "first loss": lambda row: f"{row['losses'][0]:.4f}",
        "last loss": lambda row: f"{row['losses'][-1]:.4f}",
    }
    steps = max(len(row["parts_ms"][PARTS[0]]) for row in table["rows"])
    notes = (
        f"Medians of up to {steps} steps, from the end of one to that of the next, without waiting in between; all "
        "learn one random batch. No gradient checkpointing, sdpa attention."
    )
    return "\n\n".join([f"## {table['setting']}", _table(columns, table["rows"]), notes])
