"""The handwritten Triton kernels, which do not depend on the spec; `codegen/triton.py` renders the others.

Imported on first use, because this module imports Triton.
"""

import triton
import triton.language as tl


@triton.jit
def square_sum(
    chunks, segments, pointers, sums,
    COLUMNS: tl.constexpr, TENSORS: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of each chunk's gradients in FP64, for the global gradient norm.

    The tables are those of a rendered `step`. The kernel reads the first two of a segment's COLUMNS columns,
    `entry_index` and `end`, and the second of a parameter's TENSORS pointers, which is the gradient's.
    """
    chunk = tl.program_id(0).to(tl.int64)
    segment = segments + tl.load(chunks + 2 * chunk) * COLUMNS
    start = tl.load(chunks + 2 * chunk + 1)
    entry_index, end = tl.load(segment), tl.load(segment + 1)
    remaining = end - start
    itemsize: tl.constexpr = DTYPE.primitive_bitwidth // 8
    address = tl.load(pointers + entry_index * TENSORS + 1) + start * itemsize
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    if (remaining >= CHUNK) & ((address & 15) == 0):
        for offset in range(0, CHUNK, BLOCK):
            total += _squares(address + offset * itemsize, BLOCK, lanes, DTYPE, True)
    else:
        count = tl.minimum(remaining, CHUNK).to(tl.int32)
        for offset in range(0, count, BLOCK):
            total += _squares(address + offset * itemsize, count - offset, lanes, DTYPE, False)
    tl.store(sums + chunk, tl.sum(total))


@triton.jit
def _squares(address, count, lanes, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Square BLOCK elements in FP64. ALIGNED promises a full block on a 16-byte boundary; else zero beyond `count`."""
    pointers = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        values = tl.load(tl.multiple_of(pointers, 16) + lanes)
    else:
        values = tl.load(pointers + lanes, mask=lanes < count, other=0)
    values = values.to(tl.float64)
    return values * values
