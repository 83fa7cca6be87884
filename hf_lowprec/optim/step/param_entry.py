"""One parameter's part of a step, and the segments that its elements make.

A *segment* is a contiguous run of elements, in memory and in the global index alike, whose index keeps one high word. An
unsharded tensor is one segment (one per 2³² elements); a shard may be several. Random keys belong to segments, addresses and
scalars to the entries that own them; kernels see nothing but flat runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.sharding import Run, runs
from hf_lowprec.optim.step.fused import ORTHOGONALIZED, StepSpec
from hf_lowprec.rounding import stream_keys

_HIGH_WORD = 1 << 32


_COLUMNS = ("entry_index", "end", "shift", "index_high")


def columns(spec: StepSpec) -> tuple[str, ...]:
    """Names of the columns of `Segments.table`."""
    return (*_COLUMNS, *spec.stream_names)


@dataclass
class ParamEntry:
    """One parameter's part of a step.

    Attributes:
        parameter: the parameter's number, by which random bits are drawn: its position in the optimizer, from the
            group's `first_parameter` on.
        group: its param group.
        state: its entry in `optimizer.state`.
        param: the parameter.
        written: it, then its states in spec order; this rank's parts of them, contiguous.
        states: the names of these.
        grad: its gradient, contiguous; only for the time of a step, so that it is not kept alive.
        grad_address: where that lies.
        orthogonalized: what the algorithm made of it, of a orthogonalizes spec; as long.
    """

    parameter: int
    group: ParamGroup
    state: dict[str, Any]
    param: Tensor
    written: list[Tensor]
    states: list[str]
    grad: Tensor | None = None
    grad_address: int = 0
    orthogonalized: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of the spec, in its order; a direction only once there is one."""
        assert self.grad is not None, "outside of a step there is no gradient"
        read = {"grad": self.grad} | ({} if self.orthogonalized is None else {ORTHOGONALIZED: self.orthogonalized})
        return {"param": self.written[0], **read, **dict(zip(self.states, self.written[1:], strict=True))}

    def segments(self) -> Iterator[Run]:
        """The runs of the parameter's elements whose global indices have one high word."""
        for first, length, start in runs(self.param):
            while length:
                count = min(length, _HIGH_WORD - start % _HIGH_WORD)
                yield first, count, start
                first, length, start = first + count, length - count, start + count


class Segments:
    """The segments of a fused_group of entries, on the host.

    Attributes:
        table: int64 of shape (segments, columns), see `columns`.
        entry_index: position of each segment's entry.
        first: each segment's first element in its entry's tensors.
        end: the element after its last.
        shift: what its elements' global indices are ahead of their places in these tensors.
        index_high: the high word of these indices.
        streams: `stream_keys` of the segments' random words, of shape (segments, 2 × words).
    """

    def __init__(self, spec: StepSpec, entries: Sequence[ParamEntry]) -> None:
        segments, firsts = [], []
        for entry_index, entry in enumerate(entries):
            keys = [
                half for word in spec.random_words for half in stream_keys(entry.group["seed"], entry.parameter, word)
            ]
            for first, length, start in entry.segments():
                segments.append((entry_index, first + length, start - first, start // _HIGH_WORD, *keys))
                firsts.append(first)
        self.table = torch.tensor(segments, dtype=torch.int64, device="cpu").view(len(segments), len(columns(spec)))
        self.first = torch.tensor(firsts, dtype=torch.int64, device="cpu")
        self.entry_index, self.end, self.shift, self.index_high = self.table[:, : len(_COLUMNS)].unbind(1)
        self.streams = self.table[:, len(_COLUMNS) :]

    def chunks(self, size: int) -> Tensor:
        """`(segment, first element)` of pieces of at most `size` elements, int64 of shape (chunks, 2)."""
        pieces = (self.end - self.first + (size - 1)) // size
        segment = torch.repeat_interleave(torch.arange(len(self.entry_index), device="cpu"), pieces)
        before = torch.cumsum(pieces, 0) - pieces
        first = self.first[segment] + (torch.arange(len(segment), device="cpu") - before[segment]) * size
        return torch.stack([segment, first], dim=1).contiguous()
