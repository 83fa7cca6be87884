"""Steps with gradients of other kinds than random ones, relative to the same optimizer on random ones."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

from gradient_kinds import KINDS, Shapes, give_gradients, shapes

from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import BASELINE, Candidate, our_name
from gpu.device import Device
from gpu.measuring import Say
from gpu.shapes import parameters

EMBEDDING_AND_EXPERTS = shapes(128256, 2048, 16, 8192)
FOR_REHEARSALS = shapes(96, 32, 4, 24)
COMPARED = (our_name("kahan"), our_name("stochastic"), BASELINE, "optimi AdamW, BF16, Kahan, Triton")
REPEATS = 10


def measure(
    device: Device, candidates: list[Candidate], budget: Budget, say: Say, keep: Callable[[list[dict[str, Any]]], None]
) -> dict[str, str]:
    """Hand rows to `keep` as they come, in two passes over the kinds while there is time; returns failures."""
    chosen = FOR_REHEARSALS if device.rehearsal else EMBEDDING_AND_EXPERTS
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for _ in range(2):
        for kind in KINDS:
            for candidate in (candidate for candidate in candidates if candidate.name in COMPARED):
                if budget.left < 5:
                    say("gradients: out of time")
                    return failures
                if candidate.name in failures:
                    continue
                row = rows.setdefault((kind, candidate.name), {"gradients": kind, "optimizer": candidate.name})
                samples = row.setdefault("samples", [])
                try:
                    with budget.limit(candidate.patience):
                        row["share"], times = _times(device, candidate, chosen, kind)
                        samples += times
                except (Exception, OutOfTime) as error:
                    say(f"gradients, {kind}, {candidate.name}: failed: {line(error)}")
                    if not (isinstance(error, OutOfTime) and (error.expected or samples)):
                        failures[candidate.name] = f"gradients, {kind}: {line(error)}"
                else:
                    row["device_ms"] = statistics.median(samples)
                    say(f"gradients, {kind}, {candidate.name}: {row['device_ms']:.3f} ms")
                device.release()
                keep([row for row in rows.values() if "device_ms" in row])
    return failures


def _times(device: Device, candidate: Candidate, chosen: Shapes, kind: str) -> tuple[float, list[float]]:
    """The share of the elements that this kind of gradients concerns, and milliseconds on the device."""
    params = parameters(chosen, candidate.dtype, device.device)
    share = give_gradients(params, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = candidate.build(params)
        for _ in range(3):
            optimizer.step()
    return share, [device.device_ms(optimizer.step, 5.0)[0] for _ in range(REPEATS)]
