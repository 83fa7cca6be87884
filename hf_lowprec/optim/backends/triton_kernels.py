"""Kernels that are the same for every spec; the step itself is printed by `triton_source.py`.

Imported on first use only: this is the module that needs Triton.
"""

import triton
import triton.language as tl


@triton.jit
def _block_square_sum(address, count, lanes, DTYPE: tl.constexpr, WHOLE: tl.constexpr):
    pointers = address.to(tl.pointer_type(DTYPE))
    if WHOLE:
        values = tl.load(tl.multiple_of(pointers, 16) + lanes)
    else:
        values = tl.load(pointers + lanes, mask=lanes < count, other=0)
    values = values.to(tl.float64)
    return values * values


@triton.jit
def square_sum(
    chunks, segments, pointers, sums,
    COLUMNS: tl.constexpr, TENSORS: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of each chunk's gradients, in FP64; tables as for a printed `step`.

    Of a segment's columns (see `segment_columns`) it takes the first two, of an entry_index's tensors the gradient, which is second.
    """
    chunk = tl.program_id(0).to(tl.int64)
    segment = segments + tl.load(chunks + 2 * chunk) * COLUMNS
    start = tl.load(chunks + 2 * chunk + 1)
    entry_index, end = tl.load(segment), tl.load(segment + 1)
    left = end - start
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(pointers + entry_index * TENSORS + 1) + start * size
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    if (left >= CHUNK) & ((address & 15) == 0):
        for offset in range(0, CHUNK, BLOCK):
            total += _block_square_sum(address + offset * size, BLOCK, lanes, DTYPE, True)
    else:
        count = tl.minimum(left, CHUNK).to(tl.int32)
        for offset in range(0, count, BLOCK):
            total += _block_square_sum(address + offset * size, count - offset, lanes, DTYPE, False)
    tl.store(sums + chunk, tl.sum(total))
