"""Render the sums of an algorithm's `factored` formula over the rows and the columns of each tile as Triton."""

from __future__ import annotations

from hf_lowprec.optim.backends.graph_renderer import arguments, indent
from hf_lowprec.optim.backends.trace import trace_factored, used_inputs
from hf_lowprec.optim.backends.triton.tensor_sum import aligned
from hf_lowprec.optim.backends.triton.triton_renderer import (
    load_chunk_inputs,
    load_elements,
    load_row,
    number_elements,
    render_formula,
)
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import TILES_TABLE
from hf_lowprec.rounding.block_floats import BLOCK

TILE_ROWS = 1024
"""Rows of a tile, at most; many, so that its sums take little memory."""

_MATRIX_SUM = """

@triton.jit
def sum_tile(
    {inputs_of_tile},
    row_sums, column_sums, tile_rows, count, columns, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
{lanes}
    mask = lanes < count
{block_mask}
    # In FP64, although many GPUs have few units for it: a step has two of these additions per element.
    total = tl.zeros(lanes.shape, tl.float64)
    for row_of_tile in range(0, tile_rows):
        offset = row_of_tile * columns.to(tl.int64)
        if ALIGNED:
{aligned_loads}
            term = matrix_term({inputs})
        else:
{masked_loads}
            term = tl.where(mask, matrix_term({inputs}), 0.0)
        terms = term.to(tl.float64)
        total += terms
        tl.store(row_sums + row_of_tile, tl.sum(terms))
    tl.store(column_sums + lanes, total, mask=mask)


@triton.jit
def matrix_sum(tiles, pointers, scalars, row_sums, column_sums, BLOCK: tl.constexpr):
    # The FP64 sums of `matrix_term` over the rows and the columns of each tile, of at most BLOCK columns.
    tile = tl.program_id(0).to(tl.int64)
{tile}
{inputs_of_program}
    row_sums += first_row_sum
    column_sums += first_column_sum
    if (count == BLOCK) & (columns % 8 == 0) & ((({addresses}) & 15) == 0):
        sum_tile(
            {inputs_of_tile},
            row_sums, column_sums, tile_rows, count, columns, True, BLOCK
        )
    else:
        sum_tile(
            {inputs_of_tile},
            row_sums, column_sums, tile_rows, count, columns, False, BLOCK
        )
"""


def render_matrix_sum(spec: KernelSpec) -> str:
    """The Python source of the kernel `matrix_sum`, which needs the header of `triton_source.render`.

    Args:
        spec: it must have a `factored` formula.
    """
    graph = trace_factored(spec)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    used_tensors, used_scalars = used_inputs(graph, spec.tensors), used_inputs(graph, scalars)
    inputs = [*used_tensors, *used_scalars]
    formula = render_formula("matrix_term", "the algorithm's `factored`", inputs, graph, spec.integer_tensors)
    return formula + _MATRIX_SUM.format(
        inputs=arguments(inputs, 16),
        inputs_of_tile=arguments([*(f"{name}_address" for name in used_tensors), *used_scalars], 12),
        lanes=indent(4, number_elements(spec)),
        block_mask=f"    block_mask = blocks * {BLOCK} < count" if spec.per_block_tensors else "",
        aligned_loads=indent(4, load_elements(spec, used_tensors, masked=False).splitlines()),
        masked_loads=indent(4, load_elements(spec, used_tensors, masked=True).splitlines()),
        tile=indent(4, load_row("tiles", "tile", TILES_TABLE)),
        inputs_of_program=indent(4, load_chunk_inputs(spec, scalars)),
        addresses=aligned(spec, used_tensors),
    )
