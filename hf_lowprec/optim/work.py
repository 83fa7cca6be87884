"""What a backend is given: the parameters of one layout on one device, and the tables that describe them.

A *row* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one row (one per 2³² elements); a shard may be several. Keys, scalars and pointers belong to rows,
so that kernels see nothing but flat runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.step import Layout
from hf_lowprec.rounding import step_keys, stream_keys

Group = dict[str, Any]
_HIGH_WORD = 1 << 32
GRAD = 1
"""Position of the gradient in `Work.tensors`, the one tensor that a step only reads."""


class Elements(NamedTuple):
    """What `fused_step` computes from: FP32 values of some elements, and the step's scalars."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, float]


@dataclass
class Work:
    """One parameter's part of a step.

    Attributes:
        param: the parameter.
        parameter: its position in the optimizer.
        group: its param group.
        state: its entry in `optimizer.state`.
        names: names of its state tensors, in layout order.
        tensors: parameter, gradient, then the states; contiguous, of equal size. Filled for the time of a step, so
            that gradients are not kept alive.
        addresses: where they lie.
        copied: `(tensor, contiguous copy in tensors)` of what must be copied back after the step.
    """

    param: Tensor
    parameter: int
    group: Group
    state: dict[str, Any]
    names: tuple[str, ...]
    tensors: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    copied: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def collect(self, grad: Tensor) -> None:
        """Fill `tensors` and `addresses` for a step with the gradient `grad`."""
        self.tensors = [self.param, grad, *[self.state[name] for name in self.names]]
        for k, tensor in enumerate(self.tensors):
            if not tensor.is_contiguous():
                self.tensors[k] = tensor.contiguous()
                if k != GRAD:
                    self.copied.append((tensor, self.tensors[k]))
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    def release(self) -> None:
        """Let go of the gradient and of every copy."""
        self.tensors = []
        self.copied = []

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """`(first element, length, first global index)` of every row."""
        total = self.param.numel()
        for first in range(0, total, _HIGH_WORD):
            yield first, min(_HIGH_WORD, total - first), first


@dataclass
class Rows:
    """The rows of a batch of works, on the host.

    Attributes:
        owner: position of each row's work.
        first: each row's first element in its work's tensors.
        lengths: elements per row.
        first_index: low words of the rows' first global indices.
        index_high: their high words.
        streams: keys of each row's random words, of shape (rows, words, 2).
    """

    owner: Tensor
    first: Tensor
    lengths: Tensor
    first_index: Tensor
    index_high: Tensor
    streams: Tensor

    @classmethod
    def of(cls, layout: Layout, works: Sequence[Work]) -> Rows:
        owner, first, lengths, start, streams = [], [], [], [], []
        for k, work in enumerate(works):
            keys = [stream_keys(work.group["seed"], work.parameter, word) for word in layout.words]
            for run_first, length, global_first in work.runs():
                owner.append(k)
                first.append(run_first)
                lengths.append(length)
                start.append(global_first)
                streams.append(keys)
        index = torch.tensor(start, dtype=torch.int64)
        return cls(
            torch.tensor(owner, dtype=torch.int64),
            torch.tensor(first, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int64),
            index.to(torch.int32),
            (index >> 32).to(torch.int32),
            torch.tensor(streams, dtype=torch.int32).reshape(len(owner), len(layout.words), 2),
        )

    def chunks(self, size: int) -> Tensor:
        """`(row, first element)` of pieces of at most `size` elements, int64 of shape (chunks, 2)."""
        pieces = (self.lengths + (size - 1)) // size
        row = torch.repeat_interleave(torch.arange(len(self.owner)), pieces)
        begin = torch.cumsum(pieces, 0) - pieces
        return torch.stack([row, (torch.arange(len(row)) - begin[row]) * size], dim=1).contiguous()


class Batch:
    """The parameters of one layout on one device, over as many steps as they stay the same.

    Attributes:
        layout: what is computed.
        device: where.
        works: the parameters.
        rows: the static tables.
        counts: FP32 tensor (works), the steps taken so far; `state["step"]` of each parameter is a view of it.
        kept: what a backend keeps between steps.
    """

    def __init__(self, layout: Layout, device: torch.device, works: list[Work]) -> None:
        self.layout = layout
        self.device = device
        self.works = works
        self.rows = Rows.of(layout, works)
        self.counts = torch.tensor([float(work.state["step"]) for work in works], dtype=torch.float32)
        for work, count in zip(works, self.counts.unbind(), strict=True):
            work.state["step"] = count
        self.kept: dict[str, Any] = {}
        self._scalars: list[tuple[float, ...]] = []

    def prepare(self, scalars: Callable[[Group, float, int], dict[str, float]]) -> None:
        """Compute the coming step's scalars with `scalars(group, lr, step)`, once per group and step count."""
        known: dict[tuple[int, float], tuple[float, ...]] = {}
        self._scalars = []
        for work, count in zip(self.works, self.counts.tolist(), strict=True):
            key = (id(work.group), count)
            if key not in known:
                values = scalars(work.group, float(work.group["lr"]), int(count) + 1).values()
                known[key] = tuple(torch.tensor(list(values), dtype=torch.float32).tolist())
            self._scalars.append(known[key])

    def scalars(self) -> Tensor:
        """This step's scalars, FP32 of shape (rows, scalars)."""
        table = torch.tensor(self._scalars, dtype=torch.float32)
        return table.reshape(len(self.works), len(self.layout.scalars))[self.rows.owner]

    def pointers(self) -> Tensor:
        """Addresses of the rows' first elements, int64 of shape (rows, tensors)."""
        addresses = array("q", [address for work in self.works for address in work.addresses])
        sizes = torch.tensor([dtype.itemsize for dtype in self.layout.dtypes])
        table = torch.frombuffer(addresses, dtype=torch.int64).view(len(self.works), len(sizes))
        return table[self.rows.owner] + self.rows.first[:, None] * sizes

    def keys(self) -> Tensor:
        """This step's keys, int32 of shape (rows, words, 2)."""
        step = self.counts.to(torch.int32)[self.rows.owner] + 1
        return step_keys(self.rows.streams, step[:, None], self.rows.index_high[:, None])

    def row_keys(self) -> list[dict[int, tuple[int, int]]]:
        """This step's keys as numbers, by random word, for every row."""
        return [
            {word: (key0, key1) for word, (key0, key1) in zip(self.layout.words, row, strict=True)}
            for row in self.keys().tolist()
        ]

    def elements(self, work: int, part: slice | Tensor) -> Elements:
        """The FP32 values of some elements of one work, by slice or flat indices."""
        weight, grad, *states = (tensor.view(-1)[part].float() for tensor in self.works[work].tensors)
        return Elements(
            weight,
            grad,
            {stored.name: state for stored, state in zip(self.layout.states, states, strict=True)},
            dict(zip(self.layout.scalars, self._scalars[work], strict=True)),
        )
