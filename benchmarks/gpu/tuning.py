"""Other constants for our kernel: which block, chunk and number of warps would be fastest on this GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpu import parity
from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import BF16, ours
from gpu.device import Device
from gpu.measuring import Say
from gpu.shapes import Llama, parameters
from hf_lowprec.optim.backends.triton import launch

PAIRS = [(1024, 4), (512, 2), (512, 4), (1024, 8), (2048, 8)]
"""Elements per iteration of a program, and its warps."""
CHUNKS = [8, 4, 16, 32]
"""Elements per program, in blocks."""
MODE = "kahan"


def constants(block: int, warps: int, chunk: int) -> AbstractContextManager[None]:
    """Let kernels be launched with these; optimizers made before keep tables of the old chunks."""
    new: dict[str, Any] = {"BLOCK": block, "CHUNK": chunk * block, "TAIL": block // 4, "WARPS": warps}
    return replaced(**new)


@contextmanager
def replaced(**new: Any) -> Iterator[None]:
    """Replace names of the module that launches kernels."""
    old = {name: getattr(launch, name) for name in new}
    try:
        for name, value in new.items():
            setattr(launch, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(launch, name, value)


def grid() -> list[tuple[int, int, int]]:
    """Block, warps and blocks per chunk, the shipped ones first and every pair before other chunks."""
    shipped = (launch.BLOCK, launch.WARPS, launch.CHUNK // launch.BLOCK)
    variants = [(*pair, chunk) for chunk in CHUNKS for pair in PAIRS]
    return [shipped, *(variant for variant in variants if variant != shipped)]


def tune(
    device: Device, model: Llama, variants: list[tuple[int, int, int]], budget: Budget, say: Say, keep: Callable
) -> None:
    """Hand rows to `keep` as they come: two passes over the variants, while there is time."""
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    params = parameters(model.shapes, BF16, device.device)
    for second in (False, True):
        for variant in variants:
            if budget.left < 8:
                say("tuning: out of time")
                return
            block, warps, chunk = variant
            if second and "device_ms" not in rows.get(variant, {}):
                continue
            row = rows.setdefault(variant, {"block": block, "warps": warps, "chunk": chunk * block, "samples": []})
            try:
                with budget.limit(40), constants(*variant):
                    if not second:
                        row["parity"] = parity.mismatch(device, MODE, (BF16,)) or "equal"
                    if row["parity"] == "equal":
                        row["samples"] += _times(device, params)
                        row["device_ms"] = statistics.median(row["samples"])
            except (Exception, OutOfTime) as error:
                row["failure"] = line(error)
            device.release()
            say(f"tuning: block {block}, {warps} warps, chunk {chunk * block}: {row.get('device_ms', row)}")
            keep(list(rows.values()))


def _times(device: Device, params: list) -> list[float]:
    optimizer = ours(MODE, device).build(params)
    for _ in range(3):
        optimizer.step()
    return [device.device_ms(optimizer.step, 5.0)[0] for _ in range(10)]
