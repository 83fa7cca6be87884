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

    A GPU has no integer division, and computes one in about twenty instructions. Here FP32 is exact enough: because of
    the half, what is cut to an integer is at least 1 / (2·divisor) away from one, and is off by less than 2⁻⁹ / divisor
    and 2⁻²¹. A divisor above LARGEST is exceeded once at most, so only the sign of what comes `after` counts then.
    """
    after = index - tl.minimum(divisor - first, LARGEST)
    inverse = tl.div_rn(1.0, tl.minimum(divisor, LARGEST).to(tl.float32))
    return ((after.to(tl.float32) + 0.5) * inverse + 1.0).to(tl.int32)
