"""One parameter's part of a step, and the rows that its elements make.

A *row* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one row (one per 2³² elements); a shard may be several. Random keys belong to rows, addresses and
scalars to the works that own them; kernels see nothing but flat runs.
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


_COLUMNS = ("owner", "end", "shift", "index_high")


def columns(layout: Layout) -> tuple[str, ...]:
    """Names of the columns of `Rows.table`."""
    return (*_COLUMNS, *layout.streams)


@dataclass
class Work:
    """One parameter's part of a step.

    Attributes:
        parameter: the parameter's number, by which random bits are drawn: its position in the optimizer, from the
            group's `first_parameter` on.
        group: its param group.
        state: its entry in `optimizer.state`.
        param: the parameter.
        written: it, then its states in layout order; this rank's parts of them, contiguous.
        states: the names of these.
        grad: its gradient, contiguous; only for the time of a step, so that it is not kept alive.
        grad_address: where that lies.
        direction: what the algorithm made of it, of a directed layout; as long.
    """

    parameter: int
    group: Group
    state: dict[str, Any]
    param: Tensor
    written: list[Tensor]
    states: list[str]
    grad: Tensor | None = None
    grad_address: int = 0
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


class Rows:
    """The rows of a batch of works, on the host.

    Attributes:
        table: int64 of shape (rows, columns), see `columns`.
        owner: position of each row's work.
        first: each row's first element in its work's tensors.
        end: the element after its last.
        shift: what its elements' global indices are ahead of their places in these tensors.
        index_high: the high word of these indices.
        streams: `stream_keys` of the rows' random words, of shape (rows, 2 × words).
    """

    def __init__(self, layout: Layout, works: Sequence[Work]) -> None:
        rows, firsts = [], []
        for owner, work in enumerate(works):
            keys = [half for word in layout.words for half in stream_keys(work.group["seed"], work.parameter, word)]
            for first, length, start in work.rows():
                rows.append((owner, first + length, start - first, start // _HIGH_WORD, *keys))
                firsts.append(first)
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), len(columns(layout)))
        self.first = torch.tensor(firsts, dtype=torch.int64, device="cpu")
        self.owner, self.end, self.shift, self.index_high = self.table[:, : len(_COLUMNS)].unbind(1)
        self.streams = self.table[:, len(_COLUMNS) :]

    def chunks(self, size: int) -> Tensor:
        """`(row, first element)` of pieces of at most `size` elements, int64 of shape (chunks, 2)."""
        pieces = (self.end - self.first + (size - 1)) // size
        row = torch.repeat_interleave(torch.arange(len(self.owner), device="cpu"), pieces)
        before = torch.cumsum(pieces, 0) - pieces
        first = self.first[row] + (torch.arange(len(row), device="cpu") - before[row]) * size
        return torch.stack([row, first], dim=1).contiguous()
