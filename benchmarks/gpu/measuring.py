"""Time and memory of one optimizer step, of every candidate in turn."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import BASELINE, Candidate
from gpu.device import Device
from gpu.shapes import Llama, Shapes, parameters

Say = Callable[[str], None]

LONGEST_AHEAD_MS = 100.0


@dataclass
class Samples:
    """The measurements of one candidate over all rounds, in milliseconds and bytes."""

    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    """Median device time of each round."""
    waited: int = 0
    """Steps whose device time has waiting for the host in it."""
    extra_bytes: int = 0
    state_bytes: int = 0

    def row(self, candidate: Candidate, count: int, copy_speed: float) -> dict[str, Any]:
        """The row of the table, for `count` parameters, compared with a copy of `copy_speed` bytes per second."""
        device_ms = statistics.median(self.device_ms)
        speed = candidate.bytes * count / device_ms * 1e3
        return {
            "optimizer": candidate.name,
            "device_ms": device_ms,
            "rounds_ms": self.round_ms,
            "waited_for_host": self.waited > len(self.device_ms) // 2,
            "host_ms": statistics.median(self.host_ms),
            "wall_ms": statistics.median(self.wall_ms),
            "bytes_per_parameter": candidate.bytes,
            "gigabytes_per_second": speed / 1e9,
            "of_copy": speed / copy_speed,
            "state_bytes_per_parameter": self.state_bytes / count,
            "extra_megabytes": self.extra_bytes / 1e6,
        }


def copy_speed(device: Device, size: int, repeats: int = 20) -> dict[str, float]:
    """Bytes per second of a copy within the device's memory, read and written bytes both counted."""
    source = torch.randn(size // 2, dtype=torch.bfloat16, device=device.device)  # zeros would be faster
    target = torch.empty_like(source)
    times = [device.device_ms(lambda: target.copy_(source), 1.0)[0] for _ in range(repeats + 3)][3:]
    median = statistics.median(times)
    return {"bytes": 2.0 * source.nbytes, "median_ms": median, "bytes_per_second": 2e3 * source.nbytes / median}


def add_samples(device: Device, candidate: Candidate, shapes: Shapes, repeats: int, samples: Samples) -> None:
    """One round of one candidate, from its construction on; the caller gives the memory back."""
    params = parameters(shapes, candidate.dtype, device.device)
    held = device.allocated()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = candidate.build(params)
        optimizer.step()
    device.synchronize()
    samples.state_bytes = device.allocated() - held
    started = device.allocated()
    device.reset_peak()
    optimizer.step()
    samples.extra_bytes = max(samples.extra_bytes, device.peak() - started)
    for _ in range(3):
        optimizer.step()

    pairs = [device.host_and_wall_ms(optimizer.step) for _ in range(repeats)]
    samples.host_ms += [host for host, _ in pairs]
    samples.wall_ms += [wall for _, wall in pairs]
    # Twice what the host usually needs, so that it is done before the device begins.
    ahead_ms = min(LONGEST_AHEAD_MS, 2 * statistics.median(samples.host_ms) + 1)
    device.device_ms(optimizer.step, ahead_ms)
    timed = [device.device_ms(optimizer.step, ahead_ms) for _ in range(repeats)]
    samples.device_ms += [time for time, _ in timed]
    samples.round_ms.append(statistics.median(time for time, _ in timed))
    samples.waited += sum(not ahead for _, ahead in timed)


class Table:
    """Measures the candidates on one model, in rounds of all of them, so that a drifting clock affects all equally."""

    def __init__(self, device: Device, model: Llama, candidates: list[Candidate], say: Say) -> None:
        self._device = device
        self._model = model
        self._candidates = candidates
        self._say = say
        self._samples = {candidate.name: Samples() for candidate in candidates}
        self.failures: dict[str, str] = {}
        self.copies: list[float] = []

    def measure(self, rounds: int, repeats: int, copy_bytes: int, budget: Budget, keep: Callable[[], None]) -> None:
        """Measure until done or out of time; `keep` is called whenever there is more."""
        for number in range(rounds):
            self.copies.append(copy_speed(self._device, copy_bytes)["bytes_per_second"])
            self._device.release()
            for candidate in self._candidates:
                if candidate.name in self.failures:
                    continue
                if budget.left < (20 if number else 5):
                    self._say(f"{self._model.name}: no time for {candidate.name} in round {number + 1}")
                    continue
                self._one(candidate, number, repeats, budget)
                keep()

    def _one(self, candidate: Candidate, number: int, repeats: int, budget: Budget) -> None:
        samples, begin = self._samples[candidate.name], budget.spent
        try:
            with budget.limit(candidate.patience):
                add_samples(self._device, candidate, self._model.shapes, repeats, samples)
        except (Exception, OutOfTime) as error:
            self._say(f"{self._model.name}, round {number + 1}, {candidate.name}: failed: {line(error)}")
            # What earlier rounds measured stays, and that the time is up is nobody's failure.
            if not (isinstance(error, OutOfTime) and (error.expected or samples.device_ms)):
                self.failures[candidate.name] = line(error)
        else:
            self._say(
                f"{self._model.name}, round {number + 1}, {candidate.name}: {samples.round_ms[-1]:.3f} ms"
                f" ({budget.spent - begin:.1f} s)"
            )
        # Only now, since the exception held on to what the failed step had allocated.
        self._device.release()

    def result(self) -> dict[str, Any]:
        """Rows, failures and what they were measured on."""
        count, speed = self._model.parameters, statistics.median(self.copies)
        rows = [
            self._samples[candidate.name].row(candidate, count, speed)
            for candidate in self._candidates
            if self._samples[candidate.name].device_ms and candidate.name not in self.failures
        ]
        baseline = next((row["device_ms"] for row in rows if row["optimizer"] == BASELINE), None)
        for row in rows:
            row["ratio"] = row["device_ms"] / baseline if baseline else None
        return {
            "model": self._model.name,
            "layers": self._model.layers,
            "tensors": len(self._model.shapes),
            "parameters": count,
            "copy_bytes_per_second": speed,
            "copies": self.copies,
            "rows": rows,
            "failures": self.failures,
        }


def launches(
    device: Device, model: Llama, candidates: list[Candidate], budget: Budget, say: Say, found: dict[str, Any]
) -> dict[str, str]:
    """Put kernels and copies of a step of each candidate, by the profiler, into `found`; returns failures."""
    failures: dict[str, str] = {}
    params: list[torch.nn.Parameter] = []
    optimizer: torch.optim.Optimizer | None = None
    scratch = torch.zeros(1, device=device.device)
    device.launches(scratch.zero_)  # what the profiler does when it first starts must not be part of a measurement
    for candidate in candidates:
        if budget.left < 5:
            say(f"launches: no time for {candidate.name}")
            continue
        try:
            with budget.limit(candidate.patience), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                params = parameters(model.shapes, candidate.dtype, device.device)
                optimizer = candidate.build(params)
                for _ in range(2):
                    optimizer.step()
                device.synchronize()
                found[candidate.name] = device.launches(optimizer.step)
        except (Exception, OutOfTime) as error:
            failures[candidate.name] = line(error)
            say(f"launches of {candidate.name}: failed: {line(error)}")
        params, optimizer = [], None
        device.release()
    return failures
