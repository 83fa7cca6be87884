"""What a backend is given: the parameters of one layout on one device, and the tables that describe them.

A *row* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one row (one per 2³² elements); a shard may be several. Keys, scalars and pointers belong to rows,
so that kernels see nothing but flat runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.step import Layout
from hf_lowprec.rounding import step_keys, stream_keys

Group = dict[str, Any]
_HIGH_WORD = 1 << 32


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
        parameter: the parameter's position in the optimizer.
        group: its param group.
        state: its entry in `optimizer.state`.
        written: the parameter, then its states in layout order; contiguous.
        grad: its gradient, contiguous; only for the time of a step, so that it is not kept alive.
        shape: the parameter's.
    """

    parameter: int
    group: Group
    state: dict[str, Any]
    written: list[Tensor]
    grad: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = self.written[0].shape

    @property
    def tensors(self) -> list[Tensor]:
        """Parameter, gradient, then the states; of equal size."""
        assert self.grad is not None, "outside of a step there is no gradient"
        return [self.written[0], self.grad, *self.written[1:]]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """`(first element, length, first global index)` of every row."""
        total = self.written[0].numel()
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
        written: every tensor that a step writes, but for the counts.
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
        self.written = [tensor for work in works for tensor in work.written]
        self.kept: dict[str, Any] = {}
        fixed = [[work.written[0].data_ptr(), 0, *(t.data_ptr() for t in work.written[1:])] for work in works]
        self._addresses = torch.tensor(fixed, dtype=torch.int64)
        self._itemsizes = torch.tensor([dtype.itemsize for dtype in layout.dtypes])
        self._ahead: list[float] = []
        self._kinds: list[tuple[Group, float]] = []
        self._kind = self._scalars = torch.empty(0)

    def prepare(self, scalars: Callable[[Group, float, int], dict[str, float]]) -> None:
        """Compute the coming step's scalars with `scalars(group, lr, step)`, once per group and step count."""
        counts = self.counts.tolist()
        ahead = [count - counts[0] for count in counts]
        if ahead != self._ahead:
            keys = [(id(work.group), by) for work, by in zip(self.works, ahead, strict=True)]
            kinds = {key: (work.group, key[1]) for key, work in zip(keys, self.works, strict=True)}
            position = {key: k for k, key in enumerate(kinds)}
            self._ahead, self._kinds = ahead, list(kinds.values())
            self._kind = torch.tensor([position[key] for key in keys])
        rows = [list(scalars(group, float(group["lr"]), int(counts[0] + by) + 1).values()) for group, by in self._kinds]
        self._scalars = torch.tensor(rows, dtype=torch.float32).view(len(rows), len(self.layout.scalars))

    def scalars(self) -> Tensor:
        """This step's scalars, FP32 of shape (rows, scalars)."""
        return self._scalars[self._kind[self.rows.owner]]

    def pointers(self) -> Tensor:
        """Addresses of the rows' first elements, int64 of shape (rows, tensors)."""
        grads = array("q", [work.grad.data_ptr() for work in self.works])  # type: ignore[union-attr]
        self._addresses[:, 1] = torch.frombuffer(grads, dtype=torch.int64)
        return self._addresses[self.rows.owner] + self.rows.first[:, None] * self._itemsizes

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
            dict(zip(self.layout.scalars, self._scalars[self._kind[work]].tolist(), strict=True)),
        )
