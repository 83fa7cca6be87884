"""What a backend is given: the parameters of one spec on one device, and this step's tables of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.sharding import Sharding
from hf_lowprec.optim.step.fused import CLIP, StepSpec
from hf_lowprec.optim.step.param_entry import ParamEntry, Segments
from hf_lowprec.optim.validation import refuse_overflow
from hf_lowprec.rounding import step_keys

Scalars = Callable[[ParamGroup, Any, Any], dict[str, Any]]
"""`(group, lr, step)` to the spec's scalars by name: numbers from numbers, FP64 tensors from FP64 tensors."""


class Elements(NamedTuple):
    """What `fused_step` computes from: FP32 values of some elements, and the step's scalars."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Tensor]


class FusedGroup:
    """The parameters of one spec on one device, over as many steps as they stay the same.

    Attributes:
        spec: what is computed.
        device: where.
        sharding: over which ranks the parameters are sharded, if they are.
        entries: the parameters.
        device_scalars: whether learning rates and step counts are for the device alone to know, so that a step can be
            captured in a graph and skipped without asking.
        segments: the static tables.
        params: the entries' parameters as they are stepped.
        scalars: the coming step's that were `prepare`d, FP32 of shape (entries, scalars); on `device` if device_scalars.
        clip: the step's clip factor, an FP32 scalar on `device`, if the spec is clipped.
        own: the scalars that are parameters' own, FP32 of shape (entries, 1) on `device`, if the spec has one.
        enabled: whether the step is to be taken, a bool scalar on `device`; None is yes.
        kept: what a backend keeps between steps.
        passing: what a backend keeps during one.
    """

    def __init__(
        self,
        spec: StepSpec,
        device: torch.device,
        sharding: Sharding | None,
        entries: list[ParamEntry],
        device_scalars: bool,
    ) -> None:
        self.spec = spec
        self.device = device
        self.sharding = sharding
        self.entries = entries
        self.device_scalars = device_scalars
        self.segments = Segments(spec, entries)
        self.params = [entry.written[0] for entry in entries]
        self.clip: Tensor | None = None
        self.per_param_scalars: Tensor | None = None
        self.enabled: Tensor | None = None
        self.kept: dict[str, Any] = {}
        self.passing: dict[str, Any] = {}

        where = device if device_scalars else torch.device("cpu")
        self._take_counts(where)
        read = [0] * len(spec.read)
        fixed = ([entry.written[0].data_ptr(), *read, *(t.data_ptr() for t in entry.written[1:])] for entry in entries)
        self._addresses = array("q", chain.from_iterable(fixed))
        self._pointers = torch.frombuffer(self._addresses, dtype=torch.int64).view(len(entries), -1)
        self._ahead: list[int] = []
        self._stretches: list[tuple[ParamGroup, int, int]] = []
        self._scalars = array("f", [0.0]) * (len(entries) * len(spec.scalars))
        self.scalars = torch.frombuffer(self._scalars, dtype=torch.float32).view(len(entries), -1).to(where)

    def _take_counts(self, where: torch.device) -> None:
        """Lay the step counts out in one tensor, of which `state["step"]` of each parameter becomes a view.

        Counts that are on the device already are left where they lie: a captured graph may be counting there. Those of
        an older version are FP32, and so are torch's.
        """
        steps = [entry.state["step"] for entry in self.entries]
        self._packed: Tensor | None = None
        if self.device_scalars and all(step.device == where and step.dtype == torch.int64 for step in steps):
            self._steps = steps
            return
        self._counted = array("q", map(int, steps))
        self._packed = torch.frombuffer(self._counted, dtype=torch.int64).to(where)
        self._steps = list(self._packed.unbind())
        for entry, step in zip(self.entries, self._steps, strict=True):
            entry.state["step"] = step

    @property
    def counts(self) -> Tensor:
        """The steps taken so far, int64 of shape (entries); on the CPU, or on `device` if device_scalars."""
        return torch.stack(self._steps) if self._packed is None else self._packed

    def count(self) -> None:
        """Count the step that was taken."""
        if not self.device_scalars:
            self._counted[:] = array("q", [count + 1 for count in self._counted])
            return
        taken = 1 if self.enabled is None else self.enabled.to(self._steps[0].device, torch.int64)
        if self._packed is None:
            torch._foreach_add_(self._steps, taken)
        else:
            self._packed += taken

    def prepare(self, scalars: Scalars) -> None:
        """Compute the coming step's scalars."""
        if self.device_scalars:
            self._prepare_on_device(scalars)
        else:
            self._prepare_on_host(scalars)

    def _prepare_on_host(self, scalars: Scalars) -> None:
        """Once for neighbours of one group and step count, in Python's doubles."""
        counts = self._counted.tolist()
        ahead = [count - counts[0] for count in counts]
        if ahead != self._ahead:
            self._ahead, self._stretches = ahead, []
            pairs = zip(self.entries, ahead, strict=True)
            for _, alike in groupby(pairs, lambda pair: (id(pair[0].group), pair[1])):
                (entry, by), *others = alike
                self._stretches.append((entry.group, by, 1 + len(others)))
        table = array("f")
        for group, by, number in self._stretches:
            values = scalars(group, float(group["lr"]), counts[0] + by + 1)
            segment = array("f", values.values())
            if not math.isfinite(sum(segment)):
                refuse_overflow(group, values)
            table += segment * number
        self._scalars[:] = table

    def _prepare_on_device(self, scalars: Scalars) -> None:
        """For every parameter, in FP64 tensors."""
        steps = self.counts.double() + 1
        first = 0
        for group in {id(entry.group): entry.group for entry in self.entries}.values():
            end = first + sum(entry.group is group for entry in self.entries)  # entries come group by group
            lr = group["lr"]
            if isinstance(lr, Tensor):
                lr = lr.to(self.device, torch.float64, non_blocking=True).reshape(())
            for k, column in enumerate(scalars(group, lr, steps[first:end]).values()):
                self.scalars[first:end, k] = column
            first = end

    def take_orthogonalized(self, matrices: Sequence[Tensor]) -> None:
        """Take the matrices of a orthogonalizes spec, one per entry and of its size."""
        for entry, matrix in zip(self.entries, matrices, strict=True):
            entry.orthogonalized = matrix
        self.passing = {}  # what was sent to the device may not have known their addresses

    def release(self) -> None:
        """Let go of what belongs to one step, the gradients above all."""
        self.clip = self.per_param_scalars = self.enabled = None
        self.passing = {}
        for entry in self.entries:
            entry.grad = entry.orthogonalized = None

    @property
    def skipped(self) -> bool:
        """Whether the step is not to be taken; asks the device."""
        return self.enabled is not None and not bool(self.enabled)

    def all_scalars(self, scalars: Tensor) -> Tensor:
        """`scalars`, and as further columns those of the clip factor and the parameters' own that are there."""
        columns = [scalars]
        if self.clip is not None:
            columns.append(self.clip.to(scalars.device).expand(len(scalars), 1))
        if self.per_param_scalars is not None:
            columns.append(self.per_param_scalars)
        return torch.cat(columns, dim=1) if len(columns) > 1 else scalars

    def pointers(self) -> Tensor:
        """Addresses of the entries' tensors, int64 of shape (entries, tensors), on the host; overwritten by the next."""
        width = len(self.spec.tensors)
        self._addresses[1::width] = array("q", [entry.grad_address for entry in self.entries])
        if self.spec.orthogonalizes and self.entries[0].orthogonalized is not None:
            matrices = [entry.orthogonalized for entry in self.entries if entry.orthogonalized is not None]
            self._addresses[2::width] = array("q", map(Tensor.data_ptr, matrices))
        return self._pointers

    def segment_keys(self) -> list[dict[int, tuple[int, int]]]:
        """This step's keys as numbers, by random word, for every segment; asks the device if device_scalars."""
        step = self.counts.to("cpu", torch.int32)[self.segments.entry_index] + 1
        streams = self.segments.streams.to(torch.int32).unbind(1)
        found: list[dict[int, tuple[int, int]]] = [{} for _ in step]
        for word, halves in zip(self.spec.random_words, zip(streams[::2], streams[1::2], strict=True), strict=True):
            key0, key1 = step_keys(*halves, step, self.segments.index_high.to(torch.int32))
            for keys, *pair in zip(found, key0.tolist(), key1.tolist(), strict=True):
                keys[word] = tuple(pair)
        return found

    def sums_by_work(self, chunks: Tensor, sums: Tensor) -> Tensor:
        """Sums over entries, of shape (entries), from those over chunks, in an order that does not change."""
        if "chunks per entry" not in self.kept:
            entry_index = self.segments.entry_index[chunks[:, 0]]
            self.kept["chunks per entry"] = torch.bincount(entry_index, minlength=len(self.entries)).to(self.device)
        return torch.segment_reduce(sums, "sum", lengths=self.kept["chunks per entry"], unsafe=True, initial=0)

    def elements(self, entry: int, part: slice | Tensor) -> Elements:
        """The FP32 values of some elements of one entry, by slice or flat indices."""
        values = {name: tensor.view(-1)[part].float() for name, tensor in self.entries[entry].tensors.items()}
        # Tensors, not numbers: torch divides a number by a tensor with two roundings.
        scalars = dict(zip(self.spec.scalars, self.scalars[entry].unbind(), strict=True))
        if self.clip is not None:
            scalars[CLIP] = self.clip
        if self.per_param_scalars is not None:
            scalars |= zip(self.spec.per_param_scalars, self.per_param_scalars[entry].unbind(), strict=True)
        return Elements(values.pop("param"), values.pop("grad"), values, scalars)
