"""How the `triton` backend divides a fused group into chunks: whole aligned ones, and the ragged rest.

Two kernels step them. One promises the compiler that every tensor lies on a 16-byte boundary and that all elements are
there, so each access has 128 bits and nothing is masked. The other takes what is left: ends of segments, and tensors on
other boundaries, such as gradients that are views into a bucket. A ragged chunk has no more elements than a program
handles at once, because ragged chunks are few, and a long one would be waited for.

If all tensors of a segment are misaligned by the same number of elements, only these elements are ragged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.backends.triton.loads import FACTORS
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import Segments, parts_of_runs

BOUNDARY = 16
"""Bytes: where accesses of 128 bits begin."""


class Chunks(NamedTuple):
    """The chunks of a fused group, which together have each of its elements once; in the order of its entries.

    Attributes:
        whole: int64 of shape (chunks, 2): segment, and first element in the tensors of its entry.
        ragged: int64 of shape (chunks, 4): position of its entry, segment, first element, the element after its last.
    """

    whole: Tensor
    ragged: Tensor


def alignment(pointers: Tensor) -> Tensor:
    """Bytes by which addresses exceed a boundary. All that `divide` has to know of them."""
    return pointers & (BOUNDARY - 1)


def divide(spec: KernelSpec, segments: Segments, pointers: Tensor, chunk: int, block: int) -> Chunks:
    """Divide a fused group into chunks.

    Args:
        spec: of the group.
        segments: of the group.
        pointers: addresses of the entries' tensors, or their `alignment`; int64 of shape (entries, tensors).
        chunk: elements of a whole chunk.
        block: elements of a ragged chunk, at most.
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
    """For each segment, its elements before the first one that is on a boundary in all tensors, and if there is one.

    Where there is none, the head has no elements. Scales of states in 8 bits are read one by one, wherever they are.
    """
    columns = [k for k, name in enumerate(spec.tensors) if name not in (*spec.per_block_tensors, *FACTORS)]
    sizes = torch.tensor([dtype.itemsize for dtype in spec.tensors.values()], device="cpu")[columns]
    addresses = pointers[:, columns][segments.entry_index] + segments.first[:, None] * sizes
    # Where the tensor with the smallest elements is on a boundary, the others can be.
    smallest = int(sizes.argmin())
    head = alignment(-addresses[:, smallest]) // sizes[smallest]
    if spec.per_block_tensors:
        head = torch.zeros_like(head)  # blocks are not divided
    aligned = (alignment(addresses + head[:, None] * sizes) == 0).all(dim=1)
    return torch.where(aligned, head, 0), aligned
