"""The contiguous runs of elements that kernels step through, as tables.

A *segment* is a run of elements that are contiguous both in memory and in the global index, and whose global indices
have the same high 32 bits. An unsharded tensor is one segment (one per 2³² elements); a shard may consist of several.
Random keys belong to segments, addresses and scalars to parameter entries. A *chunk* is a part of a segment: the work
of one program on a GPU, or of one iteration of a thread on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_lowprec.optim.sharding import ContiguousRun, contiguous_runs
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.param_entry import ParamEntry
from hf_lowprec.rounding import stream_keys

_HIGH_WORD = 1 << 32
_FIXED_COLUMNS = ("entry_index", "end", "shift", "index_high")
_MATRIX_COLUMNS = ("rows", "columns")
"""In `factored` specs, the lengths of the last two dimensions of this rank's part of the parameter."""


def segment_columns(spec: KernelSpec) -> tuple[str, ...]:
    """Return the names of the columns of `Segments.table`, which kernels read by position."""
    return (*_FIXED_COLUMNS, *(_MATRIX_COLUMNS if spec.factored else ()), *spec.stream_names)


class Segments:
    """The segments of a fused group's entries, on the host.

    Attributes:
        table: int64 of shape (segments, columns), see `segment_columns`.
        entry_index: position of each segment's entry in the fused group.
        first: each segment's first element in its entry's tensors.
        end: the element after its last.
        shift: an element's global index minus its place in the entry's tensors.
        index_high: the high 32 bits of the elements' global indices.
        streams: the stream keys of the segments' random words, of shape (segments, 2 × words).
    """

    def __init__(self, spec: KernelSpec, entries: Sequence[ParamEntry]) -> None:
        rows, firsts = [], []
        for entry_index, entry in enumerate(entries):
            keys = [key for word in spec.random_words for key in stream_keys(entry.group["seed"], entry.number, word)]
            shape = entry.weight.shape[-2:] if spec.factored else ()
            for first, length, start in _runs_of_one_high_word(entry.param):
                rows.append((entry_index, first + length, start - first, start // _HIGH_WORD, *shape, *keys))
                firsts.append(first)
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), len(segment_columns(spec)))
        self.first = torch.tensor(firsts, dtype=torch.int64, device="cpu")
        self.entry_index, self.end, self.shift, self.index_high = self.table[:, : len(_FIXED_COLUMNS)].unbind(1)
        self.streams = self.table[:, self.table.shape[1] - len(spec.stream_names) :]

    def chunks(self, size: int) -> Tensor:
        """Divide segments into chunks of at most `size` elements: `(segment, first element)`, int64, (chunks, 2)."""
        return torch.stack(parts_of_runs(self.first, self.end, size), dim=1)

    def of_entries(self, entries: range) -> slice:
        """Return the positions of the segments of some consecutive entries."""
        bounds = torch.tensor([entries.start, entries.stop], device="cpu")
        first, end = torch.searchsorted(self.entry_index.contiguous(), bounds).tolist()
        return slice(first, end)

    def chunk_bounds(self, chunks: Tensor, entries: int) -> list[int]:
        """Return the first chunk of each of the `entries`, as a position in `chunks`, and finally the end of all."""
        return [0, *self.chunks_per_entry(chunks, entries).cumsum(0).tolist()]

    def chunks_per_entry(self, chunks: Tensor, entries: int) -> Tensor:
        """Return the number of `chunks` of each of the `entries`; int64 of shape (entries) on the CPU."""
        return torch.bincount(self.entry_index[chunks[:, 0]], minlength=entries)


def parts_of_runs(first: Tensor, end: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Divide runs of elements into parts of at most `size`; return each part's run and first element.

    Args:
        first: each run's first element; int64 on the CPU.
        end: the element after its last.
        size: the largest size of a part.
    """
    counts = (end - first + (size - 1)) // size
    run = torch.repeat_interleave(torch.arange(len(first), device="cpu"), counts)
    before = torch.cumsum(counts, 0) - counts
    return run, first[run] + (torch.arange(len(run), device="cpu") - before[run]) * size


def sum_by_entry(chunk_sums: Tensor, chunks_per_entry: Tensor) -> Tensor:
    """Add chunks' sums to sums over entries, of shape (entries), always in the same order."""
    return torch.segment_reduce(chunk_sums, "sum", lengths=chunks_per_entry, unsafe=True, initial=0)


def _runs_of_one_high_word(param: Tensor) -> Iterator[ContiguousRun]:
    """Yield the runs of this rank's elements of `param`, split where the high 32 bits of the global index change."""
    for first, length, start in contiguous_runs(param):
        while length:
            count = min(length, _HIGH_WORD - start % _HIGH_WORD)
            yield ContiguousRun(first, count, start)
            first, length, start = first + count, length - count, start + count
