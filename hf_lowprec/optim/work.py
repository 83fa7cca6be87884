"""What a backend is given: the parameters of one layout, and the tables that describe them.

A *row* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one row (one per 2³² elements); a shard may be several. Keys, scalars and pointers belong to rows,
so that kernels see nothing but flat runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.step import Layout
from hf_lowprec.rounding import step_keys, stream_keys

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
        tensors: parameter, gradient, then the states in layout order; contiguous, of equal size.
        scalars: the layout's host-computed factors, as FP32-rounded numbers.
        parameter: the parameter's position in the optimizer.
        seed: the group's seed.
        step: the parameter's step count, from 1.
        counter: the state tensor that counts its steps; still at `step - 1`.
    """

    tensors: list[Tensor]
    scalars: tuple[float, ...]
    parameter: int
    seed: int
    step: int
    counter: Tensor

    def elements(self, layout: Layout, part: slice | Tensor) -> Elements:
        """The FP32 values of some elements, by slice or flat indices."""
        weight, grad, *states = (tensor.view(-1)[part].float() for tensor in self.tensors)
        return Elements(
            weight,
            grad,
            {stored.name: state for stored, state in zip(layout.states, states, strict=True)},
            dict(zip(layout.scalars, self.scalars, strict=True)),
        )

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """`(first element, length, first global index)` of every row."""
        total = self.tensors[0].numel()
        for first in range(0, total, _HIGH_WORD):
            yield first, min(_HIGH_WORD, total - first), first


@dataclass
class Rows:
    """The static half of the tables: what stays while the same parameters are stepped."""

    owner: list[int]
    first: list[int]
    lengths: Tensor
    first_index: Tensor
    index_high: Tensor
    streams: Tensor

    @classmethod
    def of(cls, layout: Layout, works: Sequence[Work]) -> Rows:
        owner, first, lengths, start, streams = [], [], [], [], []
        for k, work in enumerate(works):
            keys = [stream_keys(work.seed, work.parameter, word) for word in layout.words]
            for run_first, length, global_first in work.runs():
                owner.append(k)
                first.append(run_first)
                lengths.append(length)
                start.append(global_first)
                streams.append(keys)
        index = torch.tensor(start, dtype=torch.int64)
        return cls(
            owner,
            first,
            torch.tensor(lengths, dtype=torch.int64),
            index.to(torch.int32),
            (index >> 32).to(torch.int32),
            torch.tensor(streams, dtype=torch.int32).reshape(len(owner), len(layout.words), 2),
        )

    def row_keys(self, layout: Layout, works: Sequence[Work]) -> list[dict[int, tuple[int, int]]]:
        """This step's keys as numbers, by random word, for every row."""
        return [
            {word: (key0, key1) for word, (key0, key1) in zip(layout.words, row, strict=True)}
            for row in self.keys(works).tolist()
        ]

    def keys(self, works: Sequence[Work]) -> Tensor:
        """This step's keys, int32 of shape (rows, words, 2)."""
        step = torch.tensor([works[k].step for k in self.owner], dtype=torch.int32)
        return step_keys(self.streams, step[:, None], self.index_high[:, None])

    def chunks(self, size: int) -> Tensor:
        """`(row, first element)` of pieces of at most `size` elements, int64 of shape (chunks, 2)."""
        pieces = (self.lengths + (size - 1)) // size
        row = torch.repeat_interleave(torch.arange(len(self.owner)), pieces)
        begin = torch.cumsum(pieces, 0) - pieces
        return torch.stack([row, (torch.arange(len(row)) - begin[row]) * size], dim=1).contiguous()


Tables = dict[Layout, tuple[tuple, Rows, Tensor]]
"""What a backend keeps between the steps of one optimizer: signature, rows and chunks by layout."""


def signature(works: Sequence[Work]) -> tuple:
    """Equal for two steps whose `Rows` are equal."""
    return tuple((work.parameter, work.seed, work.tensors[0].numel()) for work in works)
