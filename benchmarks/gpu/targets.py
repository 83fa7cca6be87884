"""Compare the measurements with the targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.candidates import BASELINE, MODES, our_name
from gpu.training import AUTOCAST

Row = dict[str, Any]
Target = tuple[str, str, str, str]
"""What, aim, measured, verdict."""


def _judged(what: str, aim: str, value: float | None, met: Callable[[float], bool], form: str = "{:.2f}") -> Target:
    if value is None:
        return what, aim, "not measured", "—"
    return what, aim, form.format(value), "met" if met(value) else "**not met**"


def targets(result: dict[str, Any]) -> list[Target]:
    """One line each; a value that is missing was not measured, which is no success."""
    found = _parity(result)
    table = result.get("step_1b") or {}
    rows = {row["optimizer"]: row for row in table.get("rows", [])}
    if result.get("only"):
        return found
    return found + _step(rows, result.get("launches") or {}) + _training(result.get("training") or [])


def _parity(result: dict[str, Any]) -> list[Target]:
    checks = result.get("parity") or {}
    found: list[Target] = []
    for mode in MODES:
        what = f"{mode}: bits of the CPU reference"
        found.append((what, "equal", *_verdict(checks.get(mode))))
        special = _verdict(checks.get(f"{mode}, special"))
        found.append((f"{what}, infinities and NaN among the gradients", "equal", *special))
    return found


def _verdict(check: str | None) -> tuple[str, str]:
    if check is None:
        return "not measured", "—"
    return ("equal", "met") if check == "equal" else ("not equal", "**not met**")


def _step(rows: dict[str, Row], launched: dict[str, Any]) -> list[Target]:
    def value(name: str, key: str) -> float | None:
        return rows[name][key] if name in rows else None

    kahan = our_name("kahan")
    found = [_judged("kahan: share of copy bandwidth", "≥ 0.90", value(kahan, "of_copy"), lambda x: x >= 0.90)]
    for mode in MODES:
        name = our_name(mode)
        host = value(name, "host_ms")
        found.append(_judged(f"{mode}: host time of a step", "< 1 ms", host, lambda x: x < 1, "{:.2f} ms"))
        kernels = launched.get(name, {}).get("kernels")
        found.append(_judged(f"{mode}: kernels per step, one layout", "≤ 2", kernels, lambda x: x <= 2, "{:.0f}"))
    for mode in MODES:
        ratio = value(our_name(mode), "ratio")
        found.append(_judged(f"{mode}: device time × {BASELINE}", "≤ 0.70", ratio, lambda x: x <= 0.70))
    others = [name for name in rows if name.startswith(("optimi", "flashoptim"))]
    for other in others or ["optimi", "flashoptim"]:
        ours, theirs = value(kahan, "wall_ms"), value(other, "wall_ms")
        ratio = ours / theirs if ours is not None and theirs is not None else None
        found.append(_judged(f"kahan: wall time × {other}", "≤ 0.60", ratio, lambda x: x <= 0.60))
    return found


def _training(tables: list[dict[str, Any]]) -> list[Target]:
    found: list[Target] = []
    for table in tables or [{"rows": [], "batch": None}]:
        rows = {row["way"]: row for row in table["rows"]}
        base = rows.pop(AUTOCAST, None)
        where = f", {table['batch']} × {table['length']} tokens" if table["batch"] else ""
        for variant in rows or ("BF16, hf_lowprec",):
            row = rows.get(variant)
            speed = compared(row, base, "tokens_per_second")
            size = compared(row, base, "non_activation_gigabytes")
            what = f"{variant}{where}"
            found.append(_judged(f"{what}: tokens/s × autocast", "≥ 1.15", speed, lambda x: x >= 1.15))
            found.append(_judged(f"{what}: non-activation memory × autocast", "≤ 0.60", size, lambda x: x <= 0.60))
    return found


def compared(row: Row | None, base: Row | None, key: str) -> float | None:
    """A row's value over the other's, where there are both."""
    return row[key] / base[key] if row and base and base[key] else None
