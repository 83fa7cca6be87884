"""The tables of a fused group on the device, which the kernels of the `triton` backend read.

Segments are sent once. Pointers, scalars and counts are sent in every step, and chunks if the alignment of an address
has changed. Every replay of a CUDA graph reads the tables that were there when it was captured, so these are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.backends.triton.chunks import Chunks, alignment, divide
from hf_lowprec.optim.cached_property import cached_property
from hf_lowprec.optim.graph_capture import is_capturing
from hf_lowprec.optim.step.fused_group import FusedGroup

_RESERVE = 16
"""Pinned tables that are kept ready, at least: each step or norm in a graph takes one."""


class StepTables(NamedTuple):
    """This step's tables on the device: see `FusedGroup.pointers`, `scalars` and `counts`."""

    pointers: Tensor
    scalars: Tensor
    counts: Tensor


class ChunkTables(NamedTuple):
    """The chunks of a fused group on the device; see `Chunks`.

    Attributes:
        alignment: of the addresses for which they were made.
        whole: the table of whole chunks.
        ragged: that of ragged chunks.
        whole_bounds: the first whole chunk of each entry, as a position in the table, and at last the end of all.
        ragged_bounds: the same of ragged chunks.
    """

    alignment: Tensor
    whole: Tensor
    ragged: Tensor
    whole_bounds: list[int]
    ragged_bounds: list[int]

    def of_entries(self, entries: range) -> Chunks:
        """The chunks of some consecutive entries."""
        if entries == range(len(self.whole_bounds) - 1):
            return Chunks(self.whole, self.ragged)
        whole, ragged = (
            slice(bounds[entries.start], bounds[entries.stop]) for bounds in (self.whole_bounds, self.ragged_bounds)
        )
        return Chunks(self.whole[whole], self.ragged[ragged])


class DeviceTables:
    """The tables of a fused group on its device.

    Attributes:
        segments: see `Segments.table`.
        all_chunks: whole chunks and shorter ones in one table, wherever their tensors lie, for kernels that sum.
        always_enabled: an int32 scalar that enables a step.

    Args:
        fused_group: the group.
        whole_size: elements of a whole chunk.
        ragged_size: elements of a ragged chunk, at most.
    """

    def __init__(self, fused_group: FusedGroup, whole_size: int, ragged_size: int) -> None:
        self._group, self._whole_size, self._ragged_size = fused_group, whole_size, ragged_size
        self._host_chunks = fused_group.segments.chunks(whole_size)
        always_enabled = torch.ones((), dtype=torch.int32, device="cpu")
        unchanging = (self._host_chunks, fused_group.segments.table, always_enabled)
        self.all_chunks, self.segments, self.always_enabled = _upload(fused_group.device, *unchanging)
        self._of_step: StepTables | None = None  # between steps None
        # What was sent last, to be used again if addresses or their alignment have not changed.
        self._last_chunks: ChunkTables | None = None
        self._sent_pointers: _SentPointers | None = None
        # What captured graphs read in every replay, and the pinned memory that the next capture will take.
        self._captured_chunks: list[ChunkTables] = []
        self._captured_pointers: list[Tensor] = []
        self._pinned_reserve: list[Tensor] = []

    def of_step(self) -> StepTables:
        """This step's tables, sent on the first call of a step."""
        if self._of_step is None:
            group = self._group
            if group.scalars_on_device:
                self._of_step = StepTables(self._pointers(), group.scalars, group.counts)
            else:
                host_tables = (group.pointers(), group.scalars, group.counts)
                self._of_step = StepTables(*_upload(group.device, *host_tables))
        return self._of_step

    def release(self) -> None:
        """Release this step's tables."""
        self._of_step = None

    def chunks(self) -> ChunkTables:
        """The chunks for this step's addresses; divided again, and sent, if their alignment has changed.

        Gradients may be new tensors in every step, but hardly ever with another alignment.
        """
        now = alignment(self._group.pointers())
        tables = self._known_chunks(now)
        if tables is None:
            tables = self._divided(now)
        self._last_chunks = tables
        if is_capturing() and not any(tables is captured for captured in self._captured_chunks):
            self._captured_chunks.append(tables)  # every replay reads them
        return tables

    @property
    def has_chunks(self) -> bool:
        """True if the chunks for this step's addresses are on the device."""
        return self._known_chunks(alignment(self._group.pointers())) is not None

    @cached_property
    def chunks_per_entry(self) -> Tensor:
        """The number of rows that each entry has in `all_chunks`; int64 of shape (entries) on the device."""
        group = self._group
        return group.segments.chunks_per_entry(self._host_chunks, len(group.entries)).to(group.device)

    def _known_chunks(self, now: Tensor) -> ChunkTables | None:
        """The last chunks or captured ones, if they are for addresses of this alignment."""
        known = [tables for tables in (self._last_chunks, *self._captured_chunks) if tables is not None]
        return next((tables for tables in known if torch.equal(tables.alignment, now)), None)

    def _divided(self, now: Tensor) -> ChunkTables:
        """The chunks for addresses of this alignment."""
        group = self._group
        chunks = divide(group.spec, group.segments, now, self._whole_size, self._ragged_size)
        whole_bounds = _bounds(group.segments.entry_index[chunks.whole[:, 0]], len(group.entries))
        ragged_bounds = _bounds(chunks.ragged[:, 0], len(group.entries))
        if len(chunks.ragged) == 0:  # all chunks are whole
            return ChunkTables(now, self.all_chunks, chunks.ragged, whole_bounds, ragged_bounds)
        whole, ragged = _upload(group.device, *chunks)
        return ChunkTables(now, whole, ragged, whole_bounds, ragged_bounds)

    def _pointers(self) -> Tensor:
        """The table of pointers, for groups whose scalars and counts are already on the device.

        It is sent when an address has changed, and by every captured graph, from memory that is never modified.
        """
        device, pointers = self._group.device, self._group.pointers()
        if device.type == "cuda" and is_capturing():
            if not self._pinned_reserve:
                raise RuntimeError(
                    f"a graph can hold at most {_RESERVE} steps or norms of the same parameters; take a step outside "
                    "a graph before capturing the next one"
                )
            # Memory cannot be pinned during a capture, and the source of a captured copy must not be modified.
            pinned = self._pinned_reserve.pop().copy_(pointers)
            self._captured_pointers.append(pinned)
            return pinned.to(device, non_blocking=True)
        if device.type == "cuda" and len(self._pinned_reserve) < _RESERVE:
            block = torch.empty((_RESERVE, *pointers.shape), dtype=pointers.dtype, device="cpu", pin_memory=True)
            self._pinned_reserve += block.unbind()
        if self._sent_pointers is None or not torch.equal(self._sent_pointers.host, pointers):
            pointers = pointers.clone()  # the fused group writes its next ones over these
            self._sent_pointers = _SentPointers(pointers, *_upload(device, pointers))
        return self._sent_pointers.device


class _SentPointers(NamedTuple):
    """A table of pointers on the host, and its copy on the device."""

    host: Tensor
    device: Tensor


def _bounds(entry_of_row: Tensor, entries: int) -> list[int]:
    """The first row of each entry in a table that is in the order of the entries, and at last the end of all."""
    return [0, *torch.bincount(entry_of_row, minlength=entries).cumsum(0).tolist()]


def _upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Copy host tensors to `device` in one asynchronous transfer."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    # Each begins on a boundary that Triton specializes for, whatever the sizes of the others.
    ends = [0]
    for table in tables:
        ends.append(ends[-1] + -(-table.nbytes // 256) * 256)
    # Memory from torch's pinned allocator is not used again before the copy is done.
    packed = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for table, begin in zip(tables, ends[:-1], strict=True):
        packed[begin : begin + table.nbytes].view(table.dtype).view(table.shape).copy_(table)
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + table.nbytes].view(table.dtype).view(table.shape)
        for table, begin in zip(tables, ends[:-1], strict=True)
    ]
