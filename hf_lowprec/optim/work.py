"""One parameter's part of a step, and the rows that its elements make.

A *row* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one row (one per 2³² elements); a shard may be several. Keys, scalars and pointers belong to rows,
so that kernels see nothing but flat runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.shards import Run, runs
from hf_lowprec.optim.step import DIRECTION, Layout
from hf_lowprec.rounding import stream_keys

Group = dict[str, Any]
_HIGH_WORD = 1 << 32


@dataclass
class Work:
    """One parameter's part of a step.

    Attributes:
        parameter: the parameter's position in the optimizer.
        group: its param group.
        state: its entry in `optimizer.state`.
        param: the parameter.
        written: it, then its states in layout order; this rank's parts of them, contiguous.
        states: the names of these.
        grad: its gradient, contiguous; only for the time of a step, so that it is not kept alive.
        direction: what the algorithm made of it, of a directed layout; as long.
    """

    parameter: int
    group: Group
    state: dict[str, Any]
    param: Tensor
    written: list[Tensor]
    states: list[str]
    grad: Tensor | None = None
    direction: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of the layout, in its order; a direction only once there is one."""
        assert self.grad is not None, "outside of a step there is no gradient"
        read = {"grad": self.grad} | ({} if self.direction is None else {DIRECTION: self.direction})
        return {"param": self.written[0], **read, **dict(zip(self.states, self.written[1:], strict=True))}

    def rows(self) -> Iterator[Run]:
        """The runs of the parameter's elements whose global indices have one high word."""
        for first, length, start in runs(self.param):
            while length:
                count = min(length, _HIGH_WORD - start % _HIGH_WORD)
                yield first, count, start
                first, length, start = first + count, length - count, start + count


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
            for run_first, length, global_first in work.rows():
                owner.append(k)
                first.append(run_first)
                lengths.append(length)
                start.append(global_first)
                streams.append(keys)
        index = torch.tensor(start, dtype=torch.int64, device="cpu")
        return cls(
            torch.tensor(owner, dtype=torch.int64, device="cpu"),
            torch.tensor(first, dtype=torch.int64, device="cpu"),
            torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            index.to(torch.int32),
            (index >> 32).to(torch.int32),
            torch.tensor(streams, dtype=torch.int32, device="cpu").reshape(len(owner), len(layout.words), 2),
        )

    def chunks(self, size: int) -> Tensor:
        """`(row, first element)` of pieces of at most `size` elements, int64 of shape (chunks, 2)."""
        pieces = (self.lengths + (size - 1)) // size
        row = torch.repeat_interleave(torch.arange(len(self.owner), device="cpu"), pieces)
        begin = torch.cumsum(pieces, 0) - pieces
        return torch.stack([row, (torch.arange(len(row), device="cpu") - begin[row]) * size], dim=1).contiguous()
