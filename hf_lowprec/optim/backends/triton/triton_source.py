"""Render a traced step as Triton: a program per chunk around one function that performs the traced operations.

Addresses come from a table, so the compiler knows nothing about their alignment. The kernel `step` promises it, which
gives 128-bit accesses, and takes the chunks for which the promise holds. `step_ragged` steps all others, under a mask;
see `tables.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_lowprec.optim.backends.graph_renderer import arguments, description, indent, statements
from hf_lowprec.optim.backends.trace import integer_inputs, trace, trace_keys
from hf_lowprec.optim.backends.triton.rendered_sums import render_matrix_sum, render_tensor_sum
from hf_lowprec.optim.backends.triton.triton_renderer import (
    FACTORS,
    LOAD,
    RAGGED_COLUMNS,
    STORAGE,
    STORE,
    TRITON,
    WHOLE_COLUMNS,
    find_factors,
    load_chunk_inputs,
    load_elements,
    load_row,
    matrix_inputs,
    number_elements,
    render_formula,
)
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK


def render(spec: KernelSpec) -> str:
    """Render the kernels `step` and `step_ragged` for `spec` and, if needed, `tensor_sum` and `matrix_sum`, in Python.

    The `triton` backend executes it and launches the kernels.
    """
    source = _HEADER.format(description="\n# ".join(description(spec))) + ("" if spec.factored is None else _FACTORS)
    source += _render_segment_keys(spec) if spec.key_names else ""
    source += _render_step(spec) + (render_tensor_sum(spec) if spec.tensor_means else "")
    return source + ("" if spec.factored is None else render_matrix_sum(spec))


_HEADER = """\
# {description}

import triton
import triton.language as tl
"""

_FACTORS = """
from hf_lowprec.optim.backends.triton.handwritten_kernels import places_of_factors
"""


_SEGMENT_KEYS = """

@triton.jit
def segment_keys({inputs}):
    # This step's keys of the random words, from a segment's stream keys.
{body}
    return {results}
"""


def _render_segment_keys(spec: KernelSpec) -> str:
    """Render the function that computes this step's `spec.key_names` from a segment's `spec.stream_names`."""
    inputs = ["step", "index_high", *spec.stream_names]
    lines, results = statements(trace_keys(spec), TRITON, inputs)
    return _SEGMENT_KEYS.format(inputs=arguments(inputs, 8), body=indent(4, lines), results=", ".join(results))


_STEP = """

@triton.jit
def step_chunk(
    {chunk_inputs},
    CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
{lanes}
    for offset in range(0, CHUNK, BLOCK):
        index = first_index + offset + lanes
{loads}
        {outputs} = fused_step(
            {arguments}
        )
{stores}


@triton.jit
def step(
    chunks, segments, pointers, scalars, counts, enabled,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    # One optimizer step of the whole chunks of a fused group; a program computes one chunk.
    #
    # chunks: the segment of each chunk, and its first element in the tensors of the segment's parameter. It has CHUNK
    #     elements, which begin on a 16-byte boundary in all of these tensors.
    # segments: contiguous runs of a parameter's elements, see `Segments` in step/segments.py.
    # By entry_index, for each parameter: {n_pointers} pointers, {n_scalars} scalars, the count of steps so far.
    # enabled: 0 to leave everything as it is.
    # CHUNK: elements per chunk. BLOCK: elements per iteration.
    chunk = tl.program_id(0).to(tl.int64)
{chunk}
{inputs_of_chunk}
    if tl.load(enabled) != 0:
        step_chunk(
            {chunk_inputs},
            CHUNK, BLOCK
        )


@triton.jit
def load_ragged(address, lanes, count, STORAGE: tl.constexpr):
    # The elements before `count`: at once as many as a thread has, if they begin on a boundary and are complete.
    if ((address & 15) == 0) & (count % {together} == 0):
        pointer = tl.multiple_of(address.to(tl.pointer_type(STORAGE)), 16)
        stored = tl.load(pointer + lanes, mask=lanes < count // {together} * {together}, other=0)
    else:
        stored = tl.load(address.to(tl.pointer_type(STORAGE)) + lanes, mask=lanes < count, other=0)
    return stored


@triton.jit
def store_ragged(address, lanes, count, stored):
    # The counterpart of `load_ragged`.
    if ((address & 15) == 0) & (count % {together} == 0):
        pointer = tl.multiple_of(address.to(tl.pointer_type(stored.dtype)), 16)
        tl.store(pointer + lanes, stored, mask=lanes < count // {together} * {together})
    else:
        tl.store(address.to(tl.pointer_type(stored.dtype)) + lanes, stored, mask=lanes < count)


@triton.jit
def step_ragged(
    chunks, segments, pointers, scalars, counts, enabled,
    BLOCK: tl.constexpr
):
    # The same step of the other chunks: of at most BLOCK elements, wherever they begin.
    #
    # chunks: the entry_index and the segment of each chunk, its first element, and the one after its last.
    # The other tables are those of `step`.
    chunk = tl.program_id(0).to(tl.int64)
{ragged_chunk}
{inputs_of_chunk}
    count = tl.where(tl.load(enabled) != 0, end - start, 0).to(tl.int32)
{lanes}
    index = first_index + lanes
{ragged_loads}
    {outputs} = fused_step(
        {ragged_arguments}
    )
{ragged_stores}
"""


def _render_step(spec: KernelSpec) -> str:
    tensors, output_tensors = spec.tensors, spec.output_tensors
    scalars = [f"scalar_{name}" for name in spec.all_scalars]
    keys = spec.key_names
    columns = segment_columns(spec)

    inputs_of_chunk = load_chunk_inputs(spec, scalars)
    inputs_of_chunk.append("first_index = (start + shift).to(tl.int32)")
    if keys:
        # Step counts are those before this step, which counts from 1.
        key_inputs = ["tl.load(counts + entry_index).to(tl.int32) + 1", "index_high.to(tl.int32)"]
        key_inputs += [f"{name}.to(tl.int32)" for name in spec.stream_names]
        inputs_of_chunk.append(f"{', '.join(keys)} = segment_keys(\n        {arguments(key_inputs, 8)}\n    )")

    stored = {name: STORE[dtype].format(f"new_{name}") for name, dtype in output_tensors.items()}
    inputs = [*tensors, *scalars, "index", *keys]
    traced = "`fused_step` in step/fused_step.py"
    formula = render_formula("fused_step", traced, inputs, trace(spec), integer_inputs(spec))
    return formula + _STEP.format(
        arguments=arguments(inputs, 12),
        chunk_inputs=arguments(
            ["first_index", *(f"{name}_address" for name in tensors), *matrix_inputs(spec), *scalars, *keys], 12
        ),
        outputs=", ".join(f"new_{name}" for name in output_tensors),
        n_pointers=len(tensors),
        n_scalars=len(scalars),
        chunk=indent(4, [*load_row("chunks", "chunk", WHOLE_COLUMNS), *load_row("segments", "segment", columns)]),
        inputs_of_chunk=indent(4, inputs_of_chunk),
        lanes=indent(4, number_elements(spec)),
        loads=load_elements(spec, tensors, masked=False),
        stores=indent(8, [f"tl.store({name}_ptr, {value})" for name, value in stored.items()]),
        together=_TOGETHER,
        ragged_chunk=indent(4, _load_ragged_chunk(columns)),
        ragged_loads=indent(4, _load_ragged(spec)),
        ragged_arguments=arguments(inputs, 8),
        ragged_stores=indent(4, _store_ragged(spec, stored)),
    )


_TOGETHER = 8
"""Elements of a thread that `step_ragged` loads and stores together: 128 bits of BF16."""


def _load_ragged_chunk(columns: Sequence[str]) -> list[str]:
    """Write statements that look up a ragged chunk and its segment's columns."""
    known = [name for name in columns if name not in RAGGED_COLUMNS]
    return load_row("chunks", "chunk", RAGGED_COLUMNS) + load_row("segments", "segment", columns, known)


def _load_ragged(spec: KernelSpec) -> list[str]:
    """Write statements that load the elements of a ragged chunk, FP32 or int32."""
    lines = find_factors(spec, "lanes")
    for name, dtype in spec.tensors.items():
        storage = f"tl.{STORAGE[dtype]}"
        if name in FACTORS:
            pointer = f"{name}_address.to(tl.pointer_type({storage})) + {FACTORS[name]}"
            lines.append(f"{name}_stored = tl.load({pointer}, mask=lanes < count, other=0)")
        elif name in spec.per_block_tensors:
            pointer = f"{name}_address.to(tl.pointer_type({storage})) + blocks"
            lines.append(f"{name}_stored = tl.load({pointer}, mask=blocks * {BLOCK} < count, other=0)")
        else:
            lines.append(f"{name}_stored = load_ragged({name}_address, lanes, count, {storage})")
    for name, dtype in spec.tensors.items():
        lines.append(f"{name} = {LOAD[dtype].format(f'{name}_stored')}")
    return lines


def _store_ragged(spec: KernelSpec, stored: Mapping[str, str]) -> list[str]:
    """Write statements that store the new values of a ragged chunk, given as expressions by tensor."""
    lines = []
    for name, value in stored.items():
        if name in spec.per_block_tensors:
            pointer = f"{name}_address.to(tl.pointer_type(tl.{STORAGE[spec.tensors[name]]})) + blocks"
            lines.append(f"tl.store({pointer}, {value}, mask=blocks * {BLOCK} < count)")
        else:
            lines.append(f"store_ragged({name}_address, lanes, count, {value})")
    return lines
