"""What a backend is given: the parameters of one layout on one device, and this step's tables of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.shards import Spread
from hf_lowprec.optim.step import CLIP, Layout
from hf_lowprec.optim.validation import refuse_overflow
from hf_lowprec.optim.work import Group, Rows, Work
from hf_lowprec.rounding import step_keys

Scalars = Callable[[Group, Any, Any], dict[str, Any]]
"""`(group, lr, step)` to the layout's scalars by name: numbers from numbers, FP64 tensors from FP64 tensors."""


class Elements(NamedTuple):
    """What `fused_step` computes from: FP32 values of some elements, and the step's scalars."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Tensor]


class Batch:
    """The parameters of one layout on one device, over as many steps as they stay the same.

    Attributes:
        layout: what is computed.
        device: where.
        spread: over which ranks the parameters are sharded, if they are.
        works: the parameters.
        deferred: whether learning rates and step counts are for the device alone to know, so that a step can be
            captured in a graph and skipped without asking.
        rows: the static tables.
        params: the works' parameters as they are stepped.
        scalars: the coming step's that were `prepare`d, FP32 of shape (works, scalars); on `device` if deferred.
        clip: the step's clip factor, an FP32 scalar on `device`, if the layout is clipped.
        own: the scalars that are parameters' own, FP32 of shape (works, 1) on `device`, if the layout has one.
        enabled: whether the step is to be taken, a bool scalar on `device`; None is yes.
        kept: what a backend keeps between steps.
        passing: what a backend keeps during one.
    """

    def __init__(
        self, layout: Layout, device: torch.device, spread: Spread | None, works: list[Work], deferred: bool
    ) -> None:
        self.layout = layout
        self.device = device
        self.spread = spread
        self.works = works
        self.deferred = deferred
        self.rows = Rows(layout, works)
        self.params = [work.written[0] for work in works]
        self.clip: Tensor | None = None
        self.own: Tensor | None = None
        self.enabled: Tensor | None = None
        self.kept: dict[str, Any] = {}
        self.passing: dict[str, Any] = {}

        where = device if deferred else torch.device("cpu")
        self._take_counts(where)
        read = [0] * len(layout.read)
        fixed = ([work.written[0].data_ptr(), *read, *(t.data_ptr() for t in work.written[1:])] for work in works)
        self._addresses = array("q", chain.from_iterable(fixed))
        self._pointers = torch.frombuffer(self._addresses, dtype=torch.int64).view(len(works), -1)
        self._ahead: list[int] = []
        self._stretches: list[tuple[Group, int, int]] = []
        self._scalars = array("f", [0.0]) * (len(works) * len(layout.scalars))
        self.scalars = torch.frombuffer(self._scalars, dtype=torch.float32).view(len(works), -1).to(where)

    def _take_counts(self, where: torch.device) -> None:
        """Lay the step counts out in one tensor, of which `state["step"]` of each parameter becomes a view.

        Counts that are on the device already are left where they lie: a captured graph may be counting there. Those of
        an older version are FP32, and so are torch's.
        """
        steps = [work.state["step"] for work in self.works]
        self._packed: Tensor | None = None
        if self.deferred and all(step.device == where and step.dtype == torch.int64 for step in steps):
            self._steps = steps
            return
        self._counted = array("q", map(int, steps))
        self._packed = torch.frombuffer(self._counted, dtype=torch.int64).to(where)
        self._steps = list(self._packed.unbind())
        for work, step in zip(self.works, self._steps, strict=True):
            work.state["step"] = step

    @property
    def counts(self) -> Tensor:
        """The steps taken so far, int64 of shape (works); on the CPU, or on `device` if deferred."""
        return torch.stack(self._steps) if self._packed is None else self._packed

    def count(self) -> None:
        """Count the step that was taken."""
        if not self.deferred:
            self._counted[:] = array("q", [count + 1 for count in self._counted])
            return
        taken = 1 if self.enabled is None else self.enabled.to(self._steps[0].device, torch.int64)
        if self._packed is None:
            torch._foreach_add_(self._steps, taken)
        else:
            self._packed += taken

    def prepare(self, scalars: Scalars) -> None:
        """Compute the coming step's scalars."""
        if self.deferred:
            self._prepare_on_device(scalars)
        else:
            self._prepare_on_host(scalars)

    def _prepare_on_host(self, scalars: Scalars) -> None:
        """Once for neighbours of one group and step count, in Python's doubles."""
        counts = self._counted.tolist()
        ahead = [count - counts[0] for count in counts]
        if ahead != self._ahead:
            self._ahead, self._stretches = ahead, []
            pairs = zip(self.works, ahead, strict=True)
            for _, alike in groupby(pairs, lambda pair: (id(pair[0].group), pair[1])):
                (work, by), *others = alike
                self._stretches.append((work.group, by, 1 + len(others)))
        table = array("f")
        for group, by, number in self._stretches:
            values = scalars(group, float(group["lr"]), counts[0] + by + 1)
            row = array("f", values.values())
            if not math.isfinite(sum(row)):
                refuse_overflow(group, values)
            table += row * number
        self._scalars[:] = table

    def _prepare_on_device(self, scalars: Scalars) -> None:
        """For every parameter, in FP64 tensors."""
        steps = self.counts.double() + 1
        first = 0
        for group in {id(work.group): work.group for work in self.works}.values():
            end = first + sum(work.group is group for work in self.works)  # works come group by group
            lr = group["lr"]
            if isinstance(lr, Tensor):
                lr = lr.to(self.device, torch.float64, non_blocking=True).reshape(())
            for k, column in enumerate(scalars(group, lr, steps[first:end]).values()):
                self.scalars[first:end, k] = column
            first = end

    def direct(self, directions: Sequence[Tensor]) -> None:
        """Take the directions of a directed layout, one per work and of its size."""
        for work, direction in zip(self.works, directions, strict=True):
            work.direction = direction
        self.passing = {}  # what was sent to the device may not have known their addresses

    def release(self) -> None:
        """Let go of what belongs to one step, the gradients above all."""
        self.clip = self.own = self.enabled = None
        self.passing = {}
        for work in self.works:
            work.grad = work.direction = None

    @property
    def skipped(self) -> bool:
        """Whether the step is not to be taken; asks the device."""
        return self.enabled is not None and not bool(self.enabled)

    def factors(self, scalars: Tensor) -> Tensor:
        """`scalars`, and as further columns those of the clip factor and the parameters' own that are there."""
        columns = [scalars]
        if self.clip is not None:
            columns.append(self.clip.to(scalars.device).expand(len(scalars), 1))
        if self.own is not None:
            columns.append(self.own)
        return torch.cat(columns, dim=1) if len(columns) > 1 else scalars

    def pointers(self) -> Tensor:
        """Addresses of the works' tensors, int64 of shape (works, tensors), on the host; overwritten by the next."""
        width = len(self.layout.tensors)
        self._addresses[1::width] = array("q", [work.grad_address for work in self.works])
        if self.layout.directed and self.works[0].direction is not None:
            directions = [work.direction for work in self.works if work.direction is not None]
            self._addresses[2::width] = array("q", map(Tensor.data_ptr, directions))
        return self._pointers

    def row_keys(self) -> list[dict[int, tuple[int, int]]]:
        """This step's keys as numbers, by random word, for every row; asks the device if deferred."""
        step = self.counts.to("cpu", torch.int32)[self.rows.owner] + 1
        streams = self.rows.streams.to(torch.int32).unbind(1)
        found: list[dict[int, tuple[int, int]]] = [{} for _ in step]
        for word, halves in zip(self.layout.words, zip(streams[::2], streams[1::2], strict=True), strict=True):
            key0, key1 = step_keys(*halves, step, self.rows.index_high.to(torch.int32))
            for keys, *pair in zip(found, key0.tolist(), key1.tolist(), strict=True):
                keys[word] = tuple(pair)
        return found

    def sums_by_work(self, chunks: Tensor, sums: Tensor) -> Tensor:
        """Sums over works, of shape (works), from those over chunks, in an order that does not change."""
        if "chunks per work" not in self.kept:
            owner = self.rows.owner[chunks[:, 0]]
            self.kept["chunks per work"] = torch.bincount(owner, minlength=len(self.works)).to(self.device)
        return torch.segment_reduce(sums, "sum", lengths=self.kept["chunks per work"], unsafe=True, initial=0)

    def elements(self, work: int, part: slice | Tensor) -> Elements:
        """The FP32 values of some elements of one work, by slice or flat indices."""
        values = {name: tensor.view(-1)[part].float() for name, tensor in self.works[work].tensors.items()}
        # Tensors, not numbers: torch divides a number by a tensor with two roundings.
        scalars = dict(zip(self.layout.scalars, self.scalars[work].unbind(), strict=True))
        if self.clip is not None:
            scalars[CLIP] = self.clip
        if self.own is not None:
            scalars |= zip(self.layout.own, self.own[work].unbind(), strict=True)
        return Elements(values.pop("param"), values.pop("grad"), values, scalars)
