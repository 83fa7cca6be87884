"""The tables of a fused group on the device, which the kernels of the `triton` backend read.

Segments are sent once. Pointers are sent in every step, as are scalars and counts unless they are on the device
already; chunks are sent if the alignment of an address has changed.

Chunks are whole and aligned, or ragged. Two kernels step them. One promises the compiler that every tensor lies on a
16-byte boundary and that all elements exist, so each access has 128 bits and nothing is masked. The other takes the
rest: ends of segments, and tensors on other boundaries, such as gradients that are views into a bucket. A ragged chunk
has no more elements than a program handles at once: ragged chunks are few, and the step would wait for a long one.

If all tensors of a segment are misaligned by the same number of elements, only these elements are ragged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.once import cached_property
from hf_lowprec.optim.backends.triton.triton_renderer import FACTORS
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import Segments, parts_of_runs

BOUNDARY = 16
"""The boundary at which accesses of 128 bits begin, in bytes."""


class DeviceTables:
    """The tables of a fused group on its device.

    Attributes:
        segments: see `Segments.table`.
        all_chunks: whole chunks and shorter ones in one table, wherever their tensors lie, for kernels that sum.
        always_enabled: an int32 scalar that enables a step.

    Args:
        fused_group: the group.
        whole_size: elements of a whole chunk.
        ragged_size: the largest number of elements of a ragged chunk.
    """

    def __init__(self, fused_group: FusedGroup, whole_size: int, ragged_size: int) -> None:
        self._group, self._whole_size, self._ragged_size = fused_group, whole_size, ragged_size
        self._host_chunks = fused_group.segments.chunks(whole_size)
        always_enabled = torch.ones((), dtype=torch.int32, device="cpu")
        unchanging = (self._host_chunks, fused_group.segments.table, always_enabled)
        self.all_chunks, self.segments, self.always_enabled = _upload(fused_group.device, *unchanging)
        self._of_step: StepTables | None = None  # between steps None
        self._chunks: ChunkTables | None = None

    def of_step(self) -> StepTables:
        """Return this step's tables, which the first call of a step sends."""
        if self._of_step is None:
            group = self._group
            if group.scalars_on_device:
                (pointers,) = _upload(group.device, group.pointers())
                self._of_step = StepTables(pointers, group.scalars, group.counts)
            else:
                self._of_step = StepTables(*_upload(group.device, group.pointers(), group.scalars, group.counts))
        return self._of_step

    def release(self) -> None:
        """Release this step's tables."""
        self._of_step = None

    def chunks(self) -> ChunkTables:
        """Return the chunks for this step's addresses. If their alignment has changed, divide and send them again.

        Gradients may be new tensors in every step, but rarely with another alignment.
        """
        now = _alignment(self._group.pointers())
        if self._chunks is None or not torch.equal(self._chunks.alignment, now):
            self._chunks = self._divided(now)
        return self._chunks

    @cached_property
    def chunks_per_entry(self) -> Tensor:
        """The number of rows that each entry has in `all_chunks`; int64 of shape (entries) on the device."""
        group = self._group
        return group.segments.chunks_per_entry(self._host_chunks, len(group.entries)).to(group.device)

    def _divided(self, now: Tensor) -> ChunkTables:
        """Divide the group into chunks for addresses of this alignment."""
        group = self._group
        chunks = divide(group.spec, group.segments, now, self._whole_size, self._ragged_size)
        whole_bounds = _bounds(group.segments.entry_index[chunks.whole[:, 0]], len(group.entries))
        ragged_bounds = _bounds(chunks.ragged[:, 0], len(group.entries))
        if len(chunks.ragged) == 0:  # all chunks are whole
            return ChunkTables(now, self.all_chunks, chunks.ragged, whole_bounds, ragged_bounds)
        whole, ragged = _upload(group.device, *chunks)
        return ChunkTables(now, whole, ragged, whole_bounds, ragged_bounds)


class StepTables(NamedTuple):
    """This step's tables on the device: see `FusedGroup.pointers`, `scalars` and `counts`."""

    pointers: Tensor
    scalars: Tensor
    counts: Tensor


class ChunkTables(NamedTuple):
    """The chunks of a fused group on the device; see `Chunks`.

    Attributes:
        alignment: the alignment of the addresses for which they were made.
        whole: the table of whole chunks.
        ragged: the table of ragged chunks.
        whole_bounds: the first whole chunk of each entry, as a position in the table, and finally the end of all.
        ragged_bounds: the same for ragged chunks.
    """

    alignment: Tensor
    whole: Tensor
    ragged: Tensor
    whole_bounds: list[int]
    ragged_bounds: list[int]

    def of_entries(self, entries: range) -> Chunks:
        """Return the chunks of some consecutive entries."""
        if entries == range(len(self.whole_bounds) - 1):
            return Chunks(self.whole, self.ragged)
        whole, ragged = (
            slice(bounds[entries.start], bounds[entries.stop]) for bounds in (self.whole_bounds, self.ragged_bounds)
        )
        return Chunks(self.whole[whole], self.ragged[ragged])


class Chunks(NamedTuple):
    """The chunks of a fused group, which together have each of its elements once; in the order of its entries.

    Attributes:
        whole: int64 of shape (chunks, 2): segment, and first element in the tensors of its entry.
        ragged: int64 of shape (chunks, 4): position of the entry, segment, first element, the element after the last.
    """

    whole: Tensor
    ragged: Tensor


def divide(spec: KernelSpec, segments: Segments, pointers: Tensor, chunk: int, block: int) -> Chunks:
    """Divide a fused group into chunks.

    Args:
        spec: the group's spec.
        segments: the group's segments.
        pointers: addresses of the entries' tensors, or their `_alignment`; int64 of shape (entries, tensors).
        chunk: elements of a whole chunk.
        block: the largest number of elements of a ragged chunk.
    """
    first, end = segments.first, segments.end
    head, aligned = _heads(spec, segments, pointers)
    after_head = torch.minimum(first + head, end)
    count = torch.where(aligned, (end - after_head) // chunk, 0)
    rest = after_head + count * chunk
    whole = parts_of_runs(after_head, rest, chunk)

    # Two ragged runs per segment: its head, and the rest after its whole chunks.
    starts, ends = torch.stack([first, rest], dim=1).view(-1), torch.stack([after_head, end], dim=1).view(-1)
    run, start = parts_of_runs(starts, ends, block)
    segment = run // 2
    ragged = [segments.entry_index[segment], segment, start, torch.minimum(start + block, ends[run])]
    return Chunks(torch.stack(whole, dim=1), torch.stack(ragged, dim=1))


def _heads(spec: KernelSpec, segments: Segments, pointers: Tensor) -> tuple[Tensor, Tensor]:
    """Count each segment's elements before the first one on a boundary in all tensors; also return where there is one.

    Without one, the head has no elements. Scales of states in 8 bits are read one by one, on any boundary.
    """
    columns = [k for k, name in enumerate(spec.tensors) if name not in (*spec.per_block_tensors, *FACTORS)]
    sizes = torch.tensor([dtype.itemsize for dtype in spec.tensors.values()], device="cpu")[columns]
    addresses = pointers[:, columns][segments.entry_index] + segments.first[:, None] * sizes
    # Where the tensor with the smallest elements is on a boundary, the others can be, too.
    smallest = int(sizes.argmin())
    head = _alignment(-addresses[:, smallest]) // sizes[smallest]
    if spec.per_block_tensors:
        head = torch.zeros_like(head)  # blocks are not divided
    aligned = (_alignment(addresses + head[:, None] * sizes) == 0).all(dim=1)
    return torch.where(aligned, head, 0), aligned


def _alignment(pointers: Tensor) -> Tensor:
    """Return the bytes by which addresses exceed a boundary, which is all that `divide` needs."""
    return pointers & (BOUNDARY - 1)


def _bounds(entry_of_row: Tensor, entries: int) -> list[int]:
    """Return the first row of each entry in a table in the order of the entries, and finally the end of all."""
    return [0, *torch.bincount(entry_of_row, minlength=entries).cumsum(0).tolist()]


def _upload(device: torch.device, *tables: Tensor) -> list[Tensor]:
    """Copy host tensors to `device` in one asynchronous transfer."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    # Each begins on a boundary that Triton specializes for, whatever the others' sizes.
    ends = [0]
    for table in tables:
        ends.append(ends[-1] + -(-table.nbytes // 256) * 256)
    # torch's pinned allocator does not reuse memory before the copy is done.
    packed = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for table, begin in zip(tables, ends[:-1], strict=True):
        packed[begin : begin + table.nbytes].view(table.dtype).view(table.shape).copy_(table)
    there = packed.to(device, non_blocking=True)
    return [
        there[begin : begin + table.nbytes].view(table.dtype).view(table.shape)
        for table, begin in zip(tables, ends[:-1], strict=True)
    ]
