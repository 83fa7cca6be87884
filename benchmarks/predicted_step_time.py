"""Predict how long the compiled kernels take on GPUs that are not here, and what limits them.

Reads what `compiled_step.py` has recorded and prints two kinds of tables: times per billion elements, and for each GPU
how much of each resource a kernel needs at the speed of the memory. The model is in `compiled/speed_limits.py`, the
GPUs' figures are in `compiled/gpus.py`. Nothing is measured.

    python benchmarks/predicted_step_time.py [benchmarks/results/compiled-step-….json] [--gpus B200 …]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from compiled.gpus import GPUS, Gpu
from compiled.speed_limits import speed_limits

RESULTS = Path(__file__).resolve().parent / "results"
ELEMENTS = 1e9
Row = dict[str, Any]


def predicted(row: Row, gpu: Gpu) -> tuple[float, str]:
    """Seconds per billion elements, and what limits the kernel."""
    limits = speed_limits(row, gpu)
    name = max(limits, key=lambda limit: limits[limit])
    return ELEMENTS * limits[name], name


def times(rows: list[Row], gpus: dict[str, Gpu]) -> str:
    """A table of predicted times in milliseconds per billion elements, with the limit if it is not memory."""
    lines = [f"| kernel | bytes per element | {' | '.join(gpus)} |", f"| --- |{' ---: |' * (1 + len(gpus))}"]
    for name, by_target in _by_kernel(rows).items():
        cells = []
        for gpu in gpus.values():
            row = by_target.get(gpu.architecture)
            seconds, limit = predicted(row, gpu) if row else (0.0, "")
            note = "" if limit == "memory" else f" ({limit})"
            cells.append(f"{1e3 * seconds:.2f}{note}" if row else "")
        first = next(iter(by_target.values()))
        lines.append(f"| {name} | {first['read_bytes'] + first['written_bytes']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(rows: list[Row], gpu: Gpu) -> str:
    """A table of what each kernel needs on one GPU, in percent of what there is in the time that memory takes."""
    lines = []
    for name, by_target in _by_kernel(rows).items():
        if (row := by_target.get(gpu.architecture)) is None:
            continue
        limits = speed_limits(row, gpu)
        memory = limits.pop("memory")
        if not lines:
            lines = [f"| kernel | warps | {' | '.join(limits)} |", f"| --- |{' ---: |' * (1 + len(limits))}"]
        cells = [f"{100 * limit / memory:.0f}%" for limit in limits.values()]
        lines.append(f"| {name} | {row['warps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_kernel(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by kernel and target; kernels whose bytes are not known are left out."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["read_bytes"]:
            found.setdefault(row["kernel"], {})[row["target"]] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", nargs="?", type=Path, help="output of compiled_step.py (default: the latest)")
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS), metavar="NAME")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args()
    path = options.recorded or max(RESULTS.glob("compiled-step-*.json"))
    rows = json.loads(path.read_text())["rows"]
    version = rows[0]["triton"]
    rows = [row for row in rows if row["triton"] == version and row["kernel"] in (options.kernels or [row["kernel"]])]
    gpus = {name: GPUS[name] for name in options.gpus}
    print(f"Predicted from {path.name}, Triton {version}\n\nMilliseconds per billion elements\n\n{times(rows, gpus)}")
    for name, gpu in gpus.items():
        print(f"\n{name}: needed at the speed of its memory\n\n{shares(rows, gpu)}")


if __name__ == "__main__":
    main()
