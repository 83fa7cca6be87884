"""The parts of the benchmark, in the order of their importance, and what each may take of the time."""

from __future__ import annotations

import importlib.util
import platform
from datetime import date
from importlib import metadata
from typing import Any

import torch

from gpu import parity
from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import MODES, candidates, installed, our_backend
from gpu.device import Device
from gpu.measuring import Table, copy_speed, launches
from gpu.report import Report
from gpu.shapes import LLAMA_1B, TINY
from gpu.training import VARIANTS, Run, train
from gpu.trial import trial_failure


class Benchmark:
    """The parts of the command, in the order of their importance."""

    def __init__(self, device: Device, budget: Budget, report: Report) -> None:
        self.device = device
        self.budget = budget
        self.report = report
        self.result = report.result
        self.model = TINY if device.rehearsal else LLAMA_1B
        found, versions = installed(candidates(device))
        self.candidates = found
        for package, version in versions.items():
            if version.startswith("not"):
                print(f"{package}: {version}")
        distributions = ("hf-lowprec", "triton", "transformers")
        self.result |= {
            "date": str(date.today()),
            "rehearsal": device.rehearsal,
            "backend": our_backend(device),
            "machine": device.facts(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                **{name: metadata.version(name) for name in distributions if importlib.util.find_spec(_module(name))},
                **versions,
            },
        }

    def say(self, message: str) -> None:
        """A line of progress."""
        print(f"[{self.budget.spent:5.0f} s] {message}", flush=True)

    def parity(self, seconds: float) -> None:
        """Which of our modes may be timed; the others leave the tables.

        A mode that is only wrong about infinities and the like is timed, and fails the command all the same.
        """
        checks = self.result["parity"] = {}
        budget = self.budget.part(seconds)
        for special in (False, True):
            for mode in MODES:
                name = f"{mode}, special" if special else mode
                try:
                    with budget.limit(60):
                        checks[name] = parity.mismatch(self.device, mode, special=special) or "equal"
                except (Exception, OutOfTime) as error:
                    checks[name] = line(error)
                self.device.release()
                self.say(f"parity of {name}: {checks[name]}")
                if checks[name] != "equal":
                    self.report.fail(f"parity of {name}: {checks[name]}")
        wrong = {mode for mode in MODES if checks[mode] != "equal"}
        self.candidates = [candidate for candidate in self.candidates if candidate.mode not in wrong]

    def try_peers(self, seconds: float) -> None:
        """Leave out optimizers of other packages whose compilation fails or takes too long."""
        budget = self.budget.part(seconds)
        for candidate in [candidate for candidate in self.candidates if candidate.trial_seconds is not None]:
            allowed = min(candidate.trial_seconds or 0.0, budget.left)
            failure = trial_failure(candidate.name, self.device.rehearsal, allowed)
            self.say(f"trial of {candidate.name}: {failure or 'done'}")
            if failure:
                self.report.peer_failed(f"{candidate.name}: {failure}")
                self.candidates.remove(candidate)

    def copy(self) -> None:
        """The bandwidth that speeds are compared with."""
        self.result["copy"] = copy_speed(self.device, self._copy_bytes)
        self.device.release()

    @property
    def _copy_bytes(self) -> int:
        return 1 << 20 if self.device.rehearsal else 4 << 30

    def step(self, rounds: int, repeats: int, seconds: float) -> None:
        """The table of all candidates."""
        table = Table(self.device, self.model, self.candidates, self.say)

        def keep() -> None:
            self.result["step_1b"] = table.result()
            self._note(table.failures)
            self.report.write()

        table.measure(rounds, repeats, self._copy_bytes, self.budget.part(seconds), keep)
        self.candidates = [candidate for candidate in self.candidates if candidate.name not in table.failures]

    def _note(self, failures: dict[str, str]) -> None:
        ours = {candidate.name for candidate in self.candidates if candidate.mode}
        for name, message in failures.items():
            (self.report.fail if name in ours else self.report.peer_failed)(f"{name}: {message}")

    def train(self, batch: int, length: int, rounds: int, steps: int, discard: int, seconds: float) -> None:
        """Train end to end in each variant in turn."""
        budget, what = self.budget.part(seconds), f"training, {batch} × {length} tokens"
        runs = {
            variant: Run()
            for variant, mode in VARIANTS.items()
            if mode is None or self.result["parity"][mode] == "equal"
        }
        table: dict[str, Any] = {"model": self.model.name, "batch": batch, "length": length, "rows": []}
        self.result.setdefault("training", []).append(table)
        for number in range(rounds):
            for variant in list(runs):
                if budget.left < (15 if number else 5):
                    self.say(f"{what}: no time for {variant} in round {number + 1}")
                    continue
                try:
                    with budget.limit(90):
                        train(self.device, self.model, variant, (batch, length), steps, discard, runs[variant])
                except (Exception, OutOfTime) as error:
                    self.say(f"{what}, round {number + 1}, {variant}: failed: {line(error)}")
                    if not (isinstance(error, OutOfTime) and (error.expected or runs[variant].step_ms)):
                        del runs[variant]
                        self.report.fail(f"{what}, {variant}: {line(error)}")
                else:
                    self.say(f"{what}, round {number + 1}, {variant}: {runs[variant].step_ms[-1]:.2f} ms")
                self.device.release()
                done = {variant: run for variant, run in runs.items() if run.step_ms}
                table["steps"] = max((len(run.step_ms) for run in done.values()), default=0)
                table["rows"] = [
                    run.row(variant, batch * length, self.model.parameters) for variant, run in done.items()
                ]
                self.report.write()

    def launches(self, seconds: float) -> None:
        """Kernels per step. After the times, since a profiler may leave launches slower."""
        budget = self.budget.part(seconds)
        found = self.result["launches"] = {}
        failures = launches(self.device, self.model, self.candidates, budget, self.say, found)
        self._note({name: f"launches: {message}" for name, message in failures.items()})
        self.report.write()


def _module(distribution: str) -> str:
    return distribution.replace("-", "_")


def run(benchmark: Benchmark) -> None:
    """All parts. Seconds are the most a part may take from those after it."""
    rehearsal = benchmark.device.rehearsal
    benchmark.report.write()
    rounds, repeats = (2, 2) if rehearsal else (3, 20)
    length, steps, discard = (32, 2, 1) if rehearsal else (2048, 15, 4)
    parts: list[tuple[str, Any]] = [
        ("parity", lambda: benchmark.parity(100)),
        ("copy", benchmark.copy),
        ("trial of other packages", lambda: benchmark.try_peers(70)),
        ("step", lambda: benchmark.step(rounds, repeats, 310)),
        ("training", lambda: benchmark.train(4, length, 2, steps, discard, 90)),
        ("training, small batch", lambda: benchmark.train(1, length, 2, steps, discard, 60)),
        ("launches", lambda: benchmark.launches(60)),
    ]
    for name, part in parts:
        if benchmark.budget.left < 10:
            benchmark.say(f"no time for {name}")
            if name == "parity":
                benchmark.report.fail("there was no time for anything")
            continue
        try:
            part()
        except (Exception, OutOfTime) as error:
            benchmark.report.fail(f"{name}: {line(error)}")
            benchmark.say(f"{name}: failed: {line(error)}")
        try:
            benchmark.device.release()
        except RuntimeError as error:  # a kernel that wrote where it must not takes everything after it along
            benchmark.report.fail(f"the device is lost since {name}: {line(error)}")
            benchmark.report.write()
            return
        benchmark.result["machine_after"] = benchmark.device.facts()
        benchmark.report.write()
        benchmark.say(f"{name}: done")
    benchmark.report.write()
