"""Handwritten Triton: find the row and the column of elements, whose factors a step multiplies.

Imported on first use, because this module imports Triton.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(2**14)
"""More than a chunk has elements."""


@triton.jit
def places_of_factors(index, first_row, first_column, rows, columns):
    """The rows and the places of columns of some elements, counted from the row and the matrix in which a chunk begins.

    Args:
        index: the elements, counted from the chunk's first one; int32 tensor.
        first_row: the row of the chunk's first element in its matrix.
        first_column: its column.
        rows: of a matrix.
        columns: of a matrix.

    Returns:
        `(row, column)`: int32 tensors. The columns of a later matrix are counted on.
    """
    row = _quotient(index, first_column, columns)
    return row, first_column + index + (_quotient(row, first_row, rows) - row) * columns


@triton.jit
def _quotient(index, first, divisor):
    """`(first + index) // divisor`, for `first < divisor` and `index` in [0, LARGEST).

    A GPU has no integer division, and computes one in about twenty instructions, but the quotient is less than one from
    a product of FP32 numbers. Since the half lies between two multiples of 1 / divisor, which is at least 1 / LARGEST,
    rounding errors below 2⁻²² do not change the integer below it. A larger divisor is exceeded once at most, so only
    the sign counts then.
    """
    after = index - tl.minimum(divisor - first, LARGEST)
    inverse = tl.div_rn(1.0, tl.minimum(divisor, LARGEST).to(tl.float32))
    quotient = (after.to(tl.float32) + 0.5) * inverse
    return tl.floor(quotient).to(tl.int32) + 1
