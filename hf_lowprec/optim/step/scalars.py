"""Step counts and the scalars of the coming step, for all entries of a fused group.

`HostScalars` computes them with Python's doubles. `DeviceScalars` computes them with FP64 tensors on the device, so
that a step can be skipped without waiting for the device. Both give the same FP32 values.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.optim.validation import check_scalars

ScalarFormula = Callable[[ParamGroup, Any, Any], dict[str, Any]]
"""`Algorithm.scalars`: `(group, lr, step)` to scalars by name; numbers from numbers, FP64 tensors from FP64 tensors."""


class _SharedScalars(NamedTuple):
    """Neighbouring entries of one group and step count, whose scalars are therefore equal.

    Attributes:
        group: their param group.
        count_offset: their step count minus the first entry's.
        entries: the number of entries.
    """

    group: ParamGroup
    count_offset: int
    entries: int


class HostScalars:
    """Counts and scalars on the CPU.

    Attributes:
        counts: the steps taken so far, int64 of shape (entries); `state["step"]` of each parameter is a view of it.
        values: the coming step's scalars, FP32 of shape (entries, scalars).
    """

    def __init__(self, entries: Sequence[ParamEntry], scalars: int) -> None:
        self._entries = entries
        self._counts = array("q", [int(entry.optimizer_state["step"]) for entry in entries])
        self.counts = torch.frombuffer(self._counts, dtype=torch.int64)
        _set_steps(entries, self.counts)
        self._values = array("f", [0.0]) * (len(entries) * scalars)
        self.values = torch.frombuffer(self._values, dtype=torch.float32).view(len(entries), -1)
        self._expected_counts = b""
        self._shared: list[_SharedScalars] = []

    def compute(self, formula: ScalarFormula) -> None:
        """Compute the coming step's `values`, once for neighbours that share them.

        Raises:
            ValueError: a scalar is not finite in FP32.
        """
        first = self._counts[0]
        if self._counts.tobytes() != self._expected_counts:  # the user has changed one of them
            offsets = [count - first for count in self._counts]
            self._shared = _shared_scalars(self._entries, offsets)
        table = array("f")
        for group, offset, entries in self._shared:
            scalars = formula(group, float(group["lr"]), first + offset + 1)
            row = array("f", scalars.values())
            if not math.isfinite(sum(row)):
                check_scalars(group, scalars)
            table += row * entries
        self._values[:] = table

    def count_step(self, enabled: Tensor | None) -> None:
        """Count the step that was taken. `enabled` must be None: the device counts steps that may be skipped."""
        self.counts += 1
        self._expected_counts = self._counts.tobytes()


class DeviceScalars:
    """Counts and scalars on the entries' device.

    Attributes:
        counts: the steps taken so far, int64 of shape (entries); `state["step"]` of each parameter is a view of it.
        values: the coming step's scalars, FP32 of shape (entries, scalars).
    """

    def __init__(self, entries: Sequence[ParamEntry], scalars: int, device: torch.device) -> None:
        self._device = device
        self._shared = _shared_scalars(entries, [0] * len(entries))
        steps = [entry.optimizer_state["step"] for entry in entries]
        if all(step.device == device for step in steps):
            self.counts = torch.stack([step.long() for step in steps])
        else:
            self.counts = torch.tensor([int(step) for step in steps], dtype=torch.int64, device="cpu").to(device)
        _set_steps(entries, self.counts)
        self.values = torch.zeros(len(entries), scalars, dtype=torch.float32, device=device)

    def compute(self, formula: ScalarFormula) -> None:
        """Compute the coming step's `values` for every entry, without waiting for the device."""
        steps = self.counts.double() + 1
        first = 0
        for group, _, entries in self._shared:
            end = first + entries
            lr = group["lr"]
            if isinstance(lr, Tensor):
                lr = lr.to(self._device, torch.float64, non_blocking=True).reshape(())
            for k, column in enumerate(formula(group, lr, steps[first:end]).values()):
                self.values[first:end, k] = column
            first = end

    def count_step(self, enabled: Tensor | None) -> None:
        """Count the step if it was taken: `enabled` is a bool scalar, or None for yes."""
        self.counts += 1 if enabled is None else enabled


StepScalars = HostScalars | DeviceScalars


def _set_steps(entries: Sequence[ParamEntry], counts: Tensor) -> None:
    """Make `state["step"]` of each parameter a view of `counts`."""
    for entry, step in zip(entries, counts.unbind(), strict=True):
        entry.optimizer_state["step"] = step


def _shared_scalars(entries: Sequence[ParamEntry], count_offsets: Sequence[int]) -> list[_SharedScalars]:
    keys = zip((entry.group for entry in entries), count_offsets, strict=True)
    shared = []
    for _, neighbours in groupby(keys, lambda key: (id(key[0]), key[1])):
        (group, offset), *rest = neighbours
        shared.append(_SharedScalars(group, offset, 1 + len(rest)))
    return shared
