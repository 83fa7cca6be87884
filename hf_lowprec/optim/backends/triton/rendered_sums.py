"""Render the sums that some algorithms need before a step as Triton: over whole tensors, or over rows and columns."""

from __future__ import annotations

from collections.abc import Iterable

from hf_lowprec.optim.backends.graph_renderer import arguments, indent
from hf_lowprec.optim.backends.trace import trace_factored, trace_tensor_means, used_inputs
from hf_lowprec.optim.backends.triton.triton_renderer import (
    FACTORS,
    WHOLE_COLUMNS,
    load_chunk_inputs,
    load_elements,
    load_row,
    matrix_inputs,
    number_elements,
    render_formula,
)
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.matrix_tiles import TILES_TABLE
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK

_TENSOR_SUM = """

from hf_lowprec.optim.backends.triton.handwritten_kernels import sum_of_pairs, two_sum


@triton.jit
def sum_aligned_chunk(
    {chunk_inputs},
    CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
{lanes}
    # Pairs of FP32 numbers, as in `square_sum`, since many GPUs have few units for FP64.
{zeros}
    for offset in range(0, CHUNK, BLOCK):
{aligned_loads}
        {terms} = tensor_mean_terms({inputs})
{additions}
    return {results}


@triton.jit
def sum_masked_chunk(
    {chunk_inputs},
    count, BLOCK: tl.constexpr
):
{lanes}
{masked_zeros}
    for offset in range(0, count, BLOCK):
{masks}
{masked_loads}
        {terms} = tensor_mean_terms({inputs})
{masked_additions}
    return {masked_results}


@triton.jit
def tensor_sum(
    chunks, segments, pointers, scalars, sums,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    # The FP64 sums of `tensor_mean_terms` over each chunk, which has CHUNK elements or ends with its segment. The
    # tables are those of `step`, with {n_scalars} scalars each. TAIL: elements per iteration under a mask.
    chunk = tl.program_id(0).to(tl.int64)
{chunk}
{inputs_of_chunk}
    remaining = end - start
    if (remaining >= CHUNK) & ((({addresses}) & 15) == 0):
        {sums} = sum_aligned_chunk(
            {chunk_inputs},
            CHUNK, BLOCK
        )
    else:
        {sums} = sum_masked_chunk(
            {chunk_inputs},
            tl.minimum(remaining, CHUNK).to(tl.int32), TAIL
        )
{stores}
"""


def render_tensor_sum(spec: KernelSpec) -> str:
    """Render the Python source of the kernel `tensor_sum`, which needs the header of `triton_source.render`.

    Args:
        spec: a spec with `tensor_means`.
    """
    graph = trace_tensor_means(spec)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    used_tensors, used_scalars = used_inputs(graph, spec.tensors), used_inputs(graph, scalars)
    addresses, columns = [f"{name}_address" for name in used_tensors], segment_columns(spec)
    inputs, traced = [*used_tensors, *used_scalars], "the algorithm's `tensor_means`"
    formula = render_formula("tensor_mean_terms", traced, inputs, graph, spec.integer_tensors)
    factors = matrix_inputs(spec) if not FACTORS.keys().isdisjoint(used_tensors) else []
    means = range(len(spec.tensor_means))
    in_pairs = [f"high{k}, error{k} = two_sum(high{k}, term{k})\nlow{k} += error{k}" for k in means]
    return formula + _TENSOR_SUM.format(
        inputs=arguments(inputs, 16),
        zeros=indent(4, [f"{half}{k} = tl.zeros(lanes.shape, tl.float32)" for k in means for half in ("high", "low")]),
        terms=", ".join(f"term{k}" for k in means),
        additions=indent(8, [line for lines in in_pairs for line in lines.splitlines()]),
        results=", ".join(f"sum_of_pairs(high{k}, low{k}, BLOCK)" for k in means),
        masked_zeros=indent(4, [f"total{k} = tl.zeros(lanes.shape, tl.float64)" for k in means]),
        masked_additions=indent(8, [f"total{k} += tl.where(mask, term{k}.to(tl.float64), 0.0)" for k in means]),
        masked_results=", ".join(f"tl.sum(total{k})" for k in means),
        sums=", ".join(f"sum{k}" for k in means),
        stores=indent(4, [f"tl.store(sums + chunk * {len(means)} + {k}, sum{k})" for k in means]),
        chunk_inputs=arguments([*addresses, *factors, *used_scalars], 12),
        addresses=_aligned(spec, used_tensors),
        n_scalars=len(scalars),
        chunk=indent(4, [*load_row("chunks", "chunk", WHOLE_COLUMNS), *load_row("segments", "segment", columns)]),
        inputs_of_chunk=indent(4, load_chunk_inputs(spec, scalars)),
        lanes=indent(4, number_elements(spec)),
        masks=indent(8, _masks(spec)),
        aligned_loads=load_elements(spec, used_tensors, masked=False),
        masked_loads=load_elements(spec, used_tensors, masked=True),
    )


def _masks(spec: KernelSpec) -> list[str]:
    """Write statements that say which elements, and which scales, of an iteration exist."""
    masks = ["mask = offset + lanes < count"]
    return [*masks, f"block_mask = offset + blocks * {BLOCK} < count"] if spec.per_block_tensors else masks


def _aligned(spec: KernelSpec, names: Iterable[str]) -> str:
    """Return the addresses that must be multiples of 16 for wide accesses, combined."""
    return " | ".join(f"{name}_address" for name in names if name not in (*spec.per_block_tensors, *FACTORS))


TILE_ROWS = 1024
"""The largest number of rows of a tile; many, so that its sums take little memory."""

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
    """Render the Python source of the kernel `matrix_sum`, which needs the header of `triton_source.render`.

    Args:
        spec: a spec with a `factored` formula.
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
        addresses=_aligned(spec, used_tensors),
    )
