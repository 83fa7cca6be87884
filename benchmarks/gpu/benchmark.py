"""The parts of the benchmark, in the order of their importance, and what each may take of the time."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib import metadata
from typing import Any

import torch
from checkout import commit

from gpu import parity
from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import MODES, candidates, installed, our_backend
from gpu.device import Device
from gpu.measuring import Table, copy_speed, launches
from gpu.report import Report
from gpu.shapes import LLAMA_1B, TINY
from gpu.training import OURS, WAYS, Run, Setting, train
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
        distributions = ("hf-lowprec", "triton", "transformers", "liger-kernel")
        self.result |= {
            "date": str(date.today()),
            "commit": commit(),
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

    def leave_out(self, what: str) -> None:
        """Say that there was no time, or no way, to measure something."""
        self.say(f"left out: {what}")
        self.report.note("left_out", what)

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
                    self.report.note("failures", f"parity of {name}: {checks[name]}")
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
                self.report.note("peer_failures", f"{candidate.name}: {failure}")
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
            self.report.note("failures" if name in ours else "peer_failures", f"{name}: {message}")

    def train(self, setting: Setting, rounds: int, steps: int, discard: int, seconds: float) -> None:
        """Train end to end in each way in turn, and in the opposite order in every second round."""
        budget, what = self.budget.part(seconds), f"training, {setting}"
        if setting.liger and (self.device.rehearsal or not importlib.util.find_spec("liger_kernel")):
            self.leave_out(f"{what}: needs a GPU and the package liger-kernel")
            return
        checks = self.result["parity"]
        right = (way for way in WAYS if checks.get(way.removeprefix(OURS), "equal") == "equal")
        runs = {way: {clipped: Run() for clipped in (False, True)} for way in right}
        named = {"model": self.model.name, **asdict(setting)}
        tables = [{**named, "setting": f"{setting}{', clipped' * each}", "clipped": each} for each in (False, True)]
        self.result.setdefault("training", []).extend(tables)
        longest = 0.0
        for number in range(rounds):
            for way in list(runs)[:: -1 if number % 2 else 1]:
                if budget.left < (max(15, longest) if number else 5):
                    self.leave_out(f"{what}: {way} in round {number + 1}")
                    continue
                begin = budget.spent
                try:
                    with budget.limit(90):
                        train(self.device, self.model, way, setting, steps, discard, runs[way])
                except (Exception, OutOfTime) as error:
                    self.say(f"{what}, round {number + 1}, {way}: failed: {line(error)}")
                    if isinstance(error, OutOfTime) and (error.expected or runs[way][True].losses):
                        self.leave_out(f"{what}: {way} in round {number + 1}")
                    else:
                        del runs[way]
                        self.report.note("failures", f"{what}, {way}: {line(error)}")
                else:
                    longest = max(longest, budget.spent - begin)
                    self.say(f"{what}, round {number + 1}, {way}: {runs[way][False].step_ms[-1]:.2f} ms")
                self.device.release()
                sizes = (setting.batch * setting.length, self.model.parameters)
                for table in tables:
                    done = ((way, run[table["clipped"]]) for way, run in runs.items())
                    table["rows"] = [run.row(way, *sizes) for way, run in done if run.losses]
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


def run(benchmark: Benchmark, training_alone: bool = False) -> None:
    """All parts, or parity and all settings of training. Seconds are the most a part may take from those after it."""
    rehearsal = benchmark.device.rehearsal
    benchmark.report.write()
    rounds, repeats = (2, 2) if rehearsal else (3, 20)
    length, *counts = (32, 1, 2, 1) if rehearsal else (2048, 2, 15, 4)

    # Liger's last: its kernels replace those of models that are built afterwards, too.
    training: list[tuple[str, Any]] = [
        (f"training, {setting}", partial(benchmark.train, setting, *counts, seconds))
        for options, *limits in (({}, 130, 70), ({"compiled": True}, 130, 70), ({"liger": True}, 70, 40))
        for setting, seconds in zip((Setting(4, length, **options), Setting(1, length, **options)), limits, strict=True)
    ]
    step: list[tuple[str, Any]] = [
        ("copy", benchmark.copy),
        ("trial of other packages", lambda: benchmark.try_peers(70)),
        ("step", lambda: benchmark.step(rounds, repeats, 310)),
    ]
    parts: list[tuple[str, Any]] = [("parity", lambda: benchmark.parity(100))]
    if training_alone:
        parts += training
    else:
        parts += [*step, *(training if rehearsal else training[:2]), ("launches", lambda: benchmark.launches(60))]
    for name, part in parts:
        if benchmark.budget.left < 10:
            benchmark.leave_out(name)
            if name == "parity":
                benchmark.report.note("failures", "there was no time for anything")
            continue
        try:
            part()
        except (Exception, OutOfTime) as error:
            benchmark.report.note("failures", f"{name}: {line(error)}")
            benchmark.say(f"{name}: failed: {line(error)}")
        try:
            benchmark.device.release()
        except RuntimeError as error:  # a kernel that wrote where it must not takes everything after it along
            benchmark.report.note("failures", f"the device is lost since {name}: {line(error)}")
            benchmark.report.write()
            return
        benchmark.result["machine_after"] = benchmark.device.facts()
        benchmark.report.write()
        benchmark.say(f"{name}: done")
    benchmark.report.write()
