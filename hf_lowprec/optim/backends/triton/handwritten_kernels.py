"""The handwritten Triton functions, which do not depend on the spec; `triton_source.py` renders the others.

This module is imported on first use, because it imports Triton.
"""

import triton
import triton.language as tl

SMALLEST = tl.constexpr(2.0**-85)
"""A finite sum of a chunk that is at least this large is right: what the 2¹³ squares have lost to underflow, at most
2⁻¹⁵⁰ each, is 2⁻⁵² of the sum. Any other sum is computed again, from scaled gradients.
"""
SCALE = tl.constexpr(2.0**80)
"""The squares of gradients below 2⁻⁴² times `SCALE`, and of any other gradients divided by it, fit FP32's exponents."""


@triton.jit
def square_sum(
    chunks, segments, pointers, sums,
    COLUMNS: tl.constexpr, TENSORS: tl.constexpr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of each chunk's gradients, for the global gradient norm.

    The tables are those of a rendered `step`. The kernel reads the first two of a segment's COLUMNS columns,
    `entry_index` and `end`, and the second of a parameter's TENSORS pointers, which is the gradient's.

    Chunks whose sum is not exact in FP32's range are summed again, from scaled gradients.
    """
    chunk = tl.program_id(0).to(tl.int64)
    segment = segments + tl.load(chunks + 2 * chunk) * COLUMNS
    start = tl.load(chunks + 2 * chunk + 1)
    entry_index, end = tl.load(segment), tl.load(segment + 1)
    address = tl.load(pointers + entry_index * TENSORS + 1) + start * (DTYPE.primitive_bitwidth // 8)
    total = _chunk_sum(address, end - start, 1.0, DTYPE, CHUNK, BLOCK)
    if tl.float32 != DTYPE:
        if (total >= SMALLEST) & (total < float("inf")):
            tl.store(sums + chunk, total)
        else:  # also for zeros, infinity and NaN
            scale = tl.where(total < SMALLEST, SCALE, 1 / SCALE)
            inverse = tl.where(total < SMALLEST, 1 / SCALE, SCALE).to(tl.float64)
            scaled = _chunk_sum(address, end - start, scale, DTYPE, CHUNK, BLOCK)
            tl.store(sums + chunk, scaled * inverse * inverse)
    else:
        tl.store(sums + chunk, total)


@triton.jit
def _chunk_sum(address, remaining, scale, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum `(scale·g)²` over the gradients of a chunk; FP64 scalar.

    Many GPUs compute two FP64 operations per clock but 128 in FP32. So squares of 16-bit gradients, which are exact in
    FP32, are summed in pairs: FP32 sums, and FP32 sums of their exact rounding errors. Sums over threads are in FP64.
    With u = 2⁻²⁴, a thread adds 8 squares in each of 8 lanes and then the lanes, in 10 levels of exact errors of at
    most u times the thread's sum S. The sum of these errors, at most 10·u·S, is rounded at 12 levels by at most u each,
    so the thread's result is off by at most 120·u²·S = 2⁻⁴¹·S. For BF16, it is exact if no nonzero square is below
    2⁻²⁸·S, because all errors are then multiples of 2⁻⁴⁴·S. Squares of FP32 gradients are summed in FP64.
    """
    itemsize: tl.constexpr = DTYPE.primitive_bitwidth // 8
    STORAGE: tl.constexpr = tl.uint16 if tl.bfloat16 == DTYPE else DTYPE
    SUM_DTYPE: tl.constexpr = tl.float64 if tl.float32 == DTYPE else tl.float32
    lanes = tl.arange(0, BLOCK)
    high = tl.zeros((BLOCK,), SUM_DTYPE)
    low = tl.zeros((BLOCK,), SUM_DTYPE)
    if (remaining >= CHUNK) & ((address & 15) == 0):
        for offset in range(0, CHUNK, BLOCK):
            pointers = tl.multiple_of((address + offset * itemsize).to(tl.pointer_type(STORAGE)), 16)
            high, low = _add_squares(high, low, _upcast(tl.load(pointers + lanes), SUM_DTYPE) * scale)
    else:
        count = tl.minimum(remaining, CHUNK).to(tl.int32)
        for offset in range(0, count, BLOCK):
            pointers = (address + offset * itemsize).to(tl.pointer_type(STORAGE))
            values = tl.load(pointers + lanes, mask=lanes < count - offset, other=0)
            high, low = _add_squares(high, low, _upcast(values, SUM_DTYPE) * scale)
    if tl.float32 == SUM_DTYPE:
        return sum_of_pairs(high, low, BLOCK)
    else:  # Triton also compiles what follows a `return`
        return tl.sum(high)


@triton.jit
def _upcast(values, SUM_DTYPE: tl.constexpr):
    """Convert loaded gradients; BF16 ones come as 16-bit patterns, since Triton's interpreter loses subnormals."""
    if tl.uint16 == values.dtype:
        return (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(SUM_DTYPE)


@triton.jit
def _add_squares(high, low, values):
    """Add squares to pairs: in FP32 by TwoSum (Knuth), which finds the exact error of an addition."""
    if tl.float64 == high.dtype:
        return tl.fma(values, values, high), low
    total = tl.fma(values, values, high)
    negated = high - total  # minus the part of the square that is in the total
    error = (high - (total + negated)) + tl.fma(values, values, negated)
    return total, low + error


@triton.jit
def two_sum(first, second):
    """Return the FP32 sum of two numbers and its exact rounding error (Knuth). Rendered kernels call this, too."""
    total = first + second
    negated = first - total  # minus the part of the second that is in the total
    return total, (first - (total + negated)) + (second + negated)


@triton.jit
def sum_of_pairs(high, low, COUNT: tl.constexpr):
    """Sum COUNT pairs (FP32 sums, and sums of their errors), eight neighbors per thread; FP64 scalar."""
    for level in tl.static_range(3):
        high, low = _add_neighbors(high, low, COUNT >> (level + 1))
    low = tl.where(high < float("inf"), low, 0.0)  # the error of an infinite sum is NaN
    return tl.sum(high.to(tl.float64) + low.to(tl.float64))


@triton.jit
def _add_neighbors(high, low, COUNT: tl.constexpr):
    """Add each two neighboring pairs of 2·COUNT."""
    high, other_high = tl.split(tl.reshape(high, (COUNT, 2)))
    low, other_low = tl.split(tl.reshape(low, (COUNT, 2)))
    total, error = two_sum(high, other_high)
    return total, low + other_low + error


LARGEST = tl.constexpr(2**14)
"""A number larger than the elements of a chunk."""


@triton.jit
def places_of_factors(index, first_row, first_column, rows, columns):
    """Return the places of row and column factors of elements, counted from the row and matrix where a chunk begins.

    Args:
        index: the elements, counted from the chunk's first one; int32 tensor.
        first_row: the row of the chunk's first element in its matrix.
        first_column: its column.
        rows: the rows of a matrix.
        columns: the columns of a matrix.

    Returns:
        `(row, column)`: int32 tensors. The columns of a later matrix are counted on.
    """
    row = _quotient(index, first_column, columns)
    return row, first_column + index + (_quotient(row, first_row, rows) - row) * columns


@triton.jit
def _quotient(index, first, divisor):
    """Compute `(first + index) // divisor`, for `first < divisor` and `index` in [0, LARGEST).

    A GPU has no integer division, and computes one in about twenty instructions. Here, FP32 is exact enough: because of
    the half, the number that is truncated is at least 1 / (2·divisor) away from an integer, and its error is less than
    2⁻⁹ / divisor and 2⁻²¹. A divisor above LARGEST is exceeded at most once, so then only the sign of `after` counts.
    """
    after = index - tl.minimum(divisor - first, LARGEST)
    inverse = tl.div_rn(1.0, tl.minimum(divisor, LARGEST).to(tl.float32))
    return ((after.to(tl.float32) + 0.5) * inverse + 1.0).to(tl.int32)
