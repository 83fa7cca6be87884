"""Render a traced step as C: loops over chunks and elements around one function that performs the traced operations.

Steps with states in 8 bits have loops over blocks instead, see `block_loops.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from hf_lowprec.optim.backends.c.block_loops import render_block_loops
from hf_lowprec.optim.backends.c.c_language import (
    LOAD,
    LOAD_EVEN,
    LOAD_ODD,
    STORAGE,
    STORE,
    STORE_PAIR,
    WEYL_INCREMENT,
    C,
    value_type,
)
from hf_lowprec.optim.backends.graph_renderer import arguments, description, indent, statements
from hf_lowprec.optim.backends.trace import (
    integer_inputs,
    trace,
    trace_factored,
    trace_keys,
    trace_tensor_means,
    used_inputs,
)
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ROW_FACTOR, KernelSpec
from hf_lowprec.optim.step.matrix_tiles import TILE_COLUMNS, TILES_TABLE
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK

CHUNK = 1 << 15
"""Elements per chunk. The chunks of a step run in parallel; each looks up its pointers and scalars once."""

_SCHEDULE = "dynamic, 4"
"""Threads take 4 chunks from the queue at once: enough for streaming access, and few enough that an interrupted thread
does not keep the others waiting for long."""
_FACTORS = (ROW_FACTOR, COLUMN_FACTOR)
_PARTIAL_TERMS, _PARTIAL_SQUARES = 16, 32
"""The number of accumulators per sum: an addition has to wait for the previous one into the same accumulator."""


def render(spec: KernelSpec) -> str:
    """Render the C source of `step` and `square_sum` for `spec` and, if needed, of `tensor_sum` and `matrix_sum`.

    The `native` backend compiles it to a shared library and calls these functions through ctypes.
    """
    source = _HEADER.format(description="\n   ".join(description(spec)))
    source += (_render_segment_keys(spec) if spec.key_names else "") + _render_step(spec)
    source += (_render_tensor_sum(spec) if spec.tensor_means else "") + _render_square_sum(spec)
    return source + ("" if spec.factored is None else _render_matrix_sum(spec))


_HEADER = """\
/* {description} */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Two adjacent elements of 16 or 8 bits, loaded or stored together: half as many memory accesses and no shuffles. */
typedef uint32_t pair __attribute__((aligned(2), may_alias));
typedef uint16_t byte_pair __attribute__((aligned(1), may_alias));

static inline float as_float(uint32_t bits) {{ float value; memcpy(&value, &bits, 4); return value; }}
static inline uint32_t as_bits(float value) {{ uint32_t bits; memcpy(&bits, &value, 4); return bits; }}
/* Rounding adds to the bits of a NaN, so low payload bits could carry into the exponent. NaNs that arithmetic
   produces have none; NaNs loaded from FP32 tensors may, and are replaced here. */
static inline float quiet(float value) {{ return value != value ? NAN : value; }}
static inline double square(double value) {{ return value * value; }}
"""


_SEGMENT_KEYS = """
/* This step's keys of the random words, from a segment's stream keys. */
static inline void segment_keys(
        {parameters})
{{
{body}
}}
"""


def _render_segment_keys(spec: KernelSpec) -> str:
    """Render the function that computes this step's `spec.key_names` from a segment's `spec.stream_names`."""
    inputs = ("step", "index_high", *spec.stream_names)
    lines, results = statements(trace_keys(spec), C, inputs)
    stores = [f"*{key} = {result};" for key, result in zip(spec.key_names, results, strict=True)]
    parameters = [f"uint32_t {name}" for name in inputs] + [f"uint32_t *{name}" for name in spec.key_names]
    return _SEGMENT_KEYS.format(parameters=arguments(parameters, 8), body=indent(4, lines + stores))


_FUSED_STEP = """
/* One element: the operations traced from `fused_step` in step/fused_step.py. */
static inline __attribute__((always_inline)) void fused_step(
        {parameters})
{{
{body}
}}
"""

_STEP = """
/* One optimizer step of all parameters of a fused group.

   chunks: the segment of each chunk, and its first element in the tensors of the segment's parameter.
   segments: contiguous runs of a parameter's elements, see `Segments` in step/segments.py.
   By entry_index, for each parameter: {n_pointers} pointers, {n_scalars} scalars, the count of steps so far. */
void step(int64_t n_chunks, const int64_t (*chunks)[2], const int64_t (*segments)[{n_columns}],
          void *const (*pointers)[{n_pointers}], const float *scalars, const int64_t *counts, int threads)
{{
#pragma omp parallel for schedule({schedule}) num_threads(threads)
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {{
{chunk_bounds}
{rows}
{chunk_inputs}
{loops}
{end_of_row}
    }}
}}
"""

_ROWS = """\
        /* Factors have one element per row, and one per column: one row at a time. */
        const int64_t end_of_chunk = start + count;
        for (int64_t row_start = start; row_start < end_of_chunk;) {
            const int64_t start = row_start, rest_of_row = columns - start % columns;
            const int count = rest_of_row < end_of_chunk - start ? (int)rest_of_row : (int)(end_of_chunk - start);
            row_start += count;"""

_ELEMENTS = """\
        int done = 0;
{pairs}
#pragma GCC ivdep
        for (int i = done; i < count; i++) {{
{outputs}
            fused_step(
                {arguments});
{stores}
        }}"""

_PAIRS = """\
#pragma GCC ivdep
        for (int i = 0; i < count / 2; i++) {{
{outputs}
{loads}
            fused_step(
                {even_arguments});
            fused_step(
                {odd_arguments});
{stores}
        }}
        done = count / 2 * 2;
"""


def _render_step(spec: KernelSpec) -> str:
    """Render `step`, after the functions that it calls."""
    scalars = [f"scalar_{name}" for name in spec.all_scalars]
    keys = spec.key_names
    functions, loops = ("", render_block_loops(spec)) if spec.scales else _element_loops(spec, scalars)
    chunk_inputs = _load_pointers(spec, spec.tensors, spec.output_tensors) + _load_scalars(scalars)
    if keys:
        # Step counts are those before this step, which counts from 1.
        key_inputs = ["(uint32_t)counts[entry_index] + 1", "(uint32_t)index_high", *spec.stream_names]
        chunk_inputs.append(f"uint32_t {', '.join(keys)};")
        chunk_inputs.append(f"segment_keys({', '.join([*key_inputs, *(f'&{name}' for name in keys)])});")
        chunk_inputs.append("const uint32_t first_index = (uint32_t)(start + shift);")
    chunk_inputs += [
        f"uint32_t weyl{word} = first_index * {WEYL_INCREMENT} + key{word}_0;" for word in spec.random_words
    ]
    return functions + _STEP.format(
        **_table_widths(spec),
        n_scalars=len(scalars),
        schedule=_SCHEDULE,
        chunk_bounds=indent(8, _load_chunk_bounds(spec)),
        rows=_ROWS if spec.factored else "",
        chunk_inputs=indent(8, chunk_inputs),
        loops=loops,
        end_of_row=" " * 8 + "}" if spec.factored else "",
    )


def _element_loops(spec: KernelSpec, scalars: Sequence[str]) -> tuple[str, str]:
    """Render the function `fused_step` and the loops over a chunk's elements, for specs with independent elements.

    If all tensors have 16 bits, two elements are loaded and stored at a time.
    """
    tensors, output_tensors = spec.tensors, spec.output_tensors
    key1s = [f"key{word}_1" for word in spec.random_words]
    weyls = [f"weyl{word}" for word in spec.random_words]
    lines, results = statements(trace(spec), C, integer_inputs(spec))
    parameters = _declarations(tensors) + [f"float {name}" for name in scalars]
    parameters += [f"uint32_t {name}" for name in [*key1s, *weyls]]
    parameters += _declarations(output_tensors, "*new_{0}")

    def fused_step_arguments(values: list[str], weyl_offset: str = "", suffix: str = "") -> str:
        sequences = [name + weyl_offset for name in weyls]
        pointers = [f"&new_{name}{suffix}" for name in output_tensors]
        return arguments([*values, *scalars, *key1s, *sequences, *pointers], 16)

    def advance_weyls(increment: str) -> list[str]:
        return [f"{name} += {increment};" for name in weyls]

    pairs = ""
    of_elements = {name: dtype for name, dtype in tensors.items() if name not in _FACTORS}
    if set(of_elements.values()) <= STORE_PAIR.keys():
        pair_stores = [
            f"((pair *){name}_ptr)[i] = {STORE_PAIR[dtype].format(f'new_{name}_even', f'new_{name}_odd')};"
            for name, dtype in output_tensors.items()
        ]
        evens, odds = (
            [
                (_load(spec, name, f"2 * i + {k}") if name in _FACTORS else load_half[dtype].format(f"{name}_pair"))
                for name, dtype in tensors.items()
            ]
            for k, load_half in enumerate((LOAD_EVEN, LOAD_ODD))
        )
        pairs = _PAIRS.format(
            outputs=_statements(_declarations(output_tensors, "new_{0}_even, new_{0}_odd")),
            loads=indent(12, [f"const uint32_t {name}_pair = ((const pair *){name}_ptr)[i];" for name in of_elements]),
            even_arguments=fused_step_arguments(evens, "", "_even"),
            odd_arguments=fused_step_arguments(odds, f" + {WEYL_INCREMENT}", "_odd"),
            stores=indent(12, pair_stores + advance_weyls(f"2 * {WEYL_INCREMENT}")),
        )
    stores = [f"{name}_ptr[i] = {STORE[dtype].format('new_' + name)};" for name, dtype in output_tensors.items()]
    outputs = [f"*new_{name} = {result};" for name, result in zip(output_tensors, results, strict=True)]
    function = _FUSED_STEP.format(parameters=arguments(parameters, 8), body=indent(4, lines + outputs))
    return function, _ELEMENTS.format(
        pairs=pairs,
        outputs=_statements(_declarations(output_tensors, "new_{0}")),
        arguments=fused_step_arguments([_load(spec, name, "i") for name in tensors]),
        stores=indent(12, stores + advance_weyls(WEYL_INCREMENT)),
    )


_CHUNK_SUM = """
/* The FP64 sums of {summed} over each chunk. The tables are those of `step`. */
void {name}(int64_t n_chunks, const int64_t (*chunks)[2], const int64_t (*segments)[{n_columns}],
            void *const (*pointers)[{n_pointers}], const float *scalars, double *sums, int threads)
{{
#pragma omp parallel for schedule({schedule}) num_threads(threads)
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {{
{chunk_bounds}
        /* Several partial sums, because each addition waits for the previous one into the same sum. */
        double partial_sums[{n_sums}][{partial_sums}] = {{{{0}}}}, totals[{n_sums}] = {{0}};
{rows}
{chunk_inputs}
        int i = 0;
        for (; i + {partial_sums} <= count; i += {partial_sums})
            for (int j = 0; j < {partial_sums}; j++) {{
{partial_terms}
            }}
        for (; i < count; i++) {{
{terms}
        }}
{end_of_row}
        for (int k = 0; k < {n_sums}; k++) {{
            for (int j = 0; j < {partial_sums}; j++)
                totals[k] += partial_sums[k][j];
            sums[chunk * {n_sums} + k] = totals[k];
        }}
    }}
}}
"""


def _render_square_sum(spec: KernelSpec) -> str:
    """Render `square_sum`, of the gradients."""
    # Not `LOAD`: a NaN with a payload may be squared.
    grad = "as_float((uint32_t)grad_ptr[{0}] << 16)" if spec.grad_dtype == torch.bfloat16 else "grad_ptr[{0}]"
    return _CHUNK_SUM.format(
        name="square_sum",
        summed="the squares of the gradients",
        schedule="static",
        **_table_widths(spec),
        chunk_bounds=indent(8, _load_chunk_bounds(spec)),
        rows="",
        chunk_inputs=indent(8, _load_pointers(spec, ["grad"], ())),
        end_of_row="",
        partial_sums=_PARTIAL_SQUARES,
        n_sums=1,
        partial_terms=indent(16, [f"partial_sums[0][j] += square({grad.format('i + j')});"]),
        terms=indent(12, [f"totals[0] += square({grad.format('i')});"]),
    )


_TERMS = """
/* One element: the operations traced from {traced}. */
static inline __attribute__((always_inline)) void {name}(
        {parameters})
{{
{body}
}}
"""


class _Terms:
    """A C function that computes the terms of sums for one element.

    Attributes:
        function: its definition.
        count: the number of terms.
        tensors: the tensors whose elements it takes.

    Args:
        spec: the spec of the step.
        name: the name of the function.
        traced: what it computes, in words.
        graph: the trace of what it computes.
    """

    def __init__(self, spec: KernelSpec, name: str, traced: str, graph: fx.Graph) -> None:
        lines, results = statements(graph, C, spec.integer_tensors)
        self._spec, self._name, self.count = spec, name, len(results)
        self.tensors = used_inputs(graph, spec.tensors)
        self._scalars = used_inputs(graph, [f"scalar_{scalar}" for scalar in spec.host_scalars])
        parameters = _declarations({tensor: spec.tensors[tensor] for tensor in self.tensors})
        parameters += [f"float {scalar}" for scalar in self._scalars] + [f"float *term{k}" for k in range(self.count)]
        body = indent(4, lines + [f"*term{k} = {result};" for k, result in enumerate(results)])
        self.function = _TERMS.format(traced=traced, name=name, parameters=arguments(parameters, 8), body=body)

    def add(self, index: str, place: str) -> list[str]:
        """Write statements that add the terms of element `index` to the sums at `place`; {0} is a term's number."""
        values = [_load(self._spec, tensor, index) for tensor in self.tensors]
        outputs = [f"term{k}" for k in range(self.count)]
        inputs = arguments([*values, *self._scalars, *(f"&{name}" for name in outputs)], 20)
        sums = [f"{place.format(k)} += {name};" for k, name in enumerate(outputs)]
        return [f"float {', '.join(outputs)};", f"{self._name}(\n{' ' * 20}{inputs});", *sums]


_MATRIX_SUM = """
/* The FP64 sums of `matrix_terms` over the rows and the columns of each tile, see `MatrixTiles`. */
void matrix_sum(int64_t n_tiles, const int64_t (*tiles)[{n_columns}], void *const (*pointers)[{n_pointers}],
                const float *scalars, double *row_sums, double *column_sums, int threads)
{{
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t tile = 0; tile < n_tiles; tile++) {{
{tile}
{scalars}
        double column_sum[{most_columns}] = {{0}};
        for (int64_t row = 0; row < tile_rows; row++) {{
            const int64_t start = first + row * columns;
{pointers}
            double partial_sums[{partial_sums}] = {{0}}, total = 0;
            int i = 0;
            for (; i + {partial_sums} <= count; i += {partial_sums})
                for (int j = 0; j < {partial_sums}; j++) {{
{partial_terms}
                    column_sum[i + j] += term0;
                }}
            for (; i < count; i++) {{
{terms}
                column_sum[i] += term0;
            }}
            for (int j = 0; j < {partial_sums}; j++)
                total += partial_sums[j];
            row_sums[first_row_sum + row] = total;
        }}
        memcpy(column_sums + first_column_sum, column_sum, count * sizeof(double));
    }}
}}
"""


def _render_matrix_sum(spec: KernelSpec) -> str:
    """Render `matrix_sum`, for the algorithm's `factored`, after the function that it calls."""
    terms = _Terms(spec, "matrix_terms", "the algorithm's `factored`", trace_factored(spec))
    names = ["first" if name == "start" else name for name in TILES_TABLE]
    return terms.function + _MATRIX_SUM.format(
        n_columns=len(names),
        n_pointers=len(spec.tensors),
        tile=indent(8, [f"const int64_t {name} = tiles[tile][{k}];" for k, name in enumerate(names)]),
        scalars=indent(8, _load_scalars([f"scalar_{name}" for name in spec.host_scalars])),
        most_columns=TILE_COLUMNS,
        pointers=indent(12, _load_pointers(spec, terms.tensors, ())),
        partial_sums=_PARTIAL_TERMS,
        partial_terms=indent(20, terms.add("i + j", "partial_sums[j]")),
        terms=indent(16, terms.add("i", "total")),
    )


def _render_tensor_sum(spec: KernelSpec) -> str:
    """Render `tensor_sum`, for the algorithm's `tensor_means`, after the function that it calls."""
    terms = _Terms(spec, "tensor_mean_terms", "the algorithm's `tensor_means`", trace_tensor_means(spec))
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    by_rows = spec.factored is not None and not {*_FACTORS}.isdisjoint(terms.tensors)
    return terms.function + _CHUNK_SUM.format(
        name="tensor_sum",
        summed="`tensor_mean_terms`",
        schedule=_SCHEDULE,
        **_table_widths(spec),
        chunk_bounds=indent(8, _load_chunk_bounds(spec)),
        rows=_ROWS if by_rows else "",
        chunk_inputs=indent(8, _load_pointers(spec, terms.tensors, ()) + _load_scalars(scalars)),
        end_of_row=" " * 8 + "}" if by_rows else "",
        partial_sums=_PARTIAL_TERMS,
        n_sums=terms.count,
        partial_terms=indent(16, terms.add("i + j", "partial_sums[{0}][j]")),
        terms=indent(12, terms.add("i", "totals[{0}]")),
    )


def _place(spec: KernelSpec, name: str, index: str) -> str:
    """Return the place in the tensor `name` for the parameter's element `index`."""
    if name == ROW_FACTOR:
        return f"{index} / columns" if index == "start" else "0"
    if name == COLUMN_FACTOR and index == "start":
        return "start / (rows * columns) * columns + start % columns"
    return f"({index}) / {BLOCK}" if name in spec.per_block_tensors else index


def _load(spec: KernelSpec, name: str, index: str) -> str:
    """Return the value of the tensor `name` for element `index`, counted from where the pointers point."""
    return LOAD[spec.tensors[name]].format(f"{name}_ptr[{_place(spec, name, index)}]")


def _declarations(tensors: Mapping[str, torch.dtype], variable: str = "{0}") -> list[str]:
    """Declare a variable for a loaded element of each of `tensors`; `variable` gives its name from theirs."""
    return [f"{value_type(dtype.is_floating_point)} {variable.format(name)}" for name, dtype in tensors.items()]


def _statements(declarations: Iterable[str]) -> str:
    return indent(12, [f"{declaration};" for declaration in declarations])


def _table_widths(spec: KernelSpec) -> dict[str, int]:
    """Return the number of entries in each row of the tables of segments and pointers."""
    return {"n_columns": len(segment_columns(spec)), "n_pointers": len(spec.tensors)}


def _load_chunk_bounds(spec: KernelSpec) -> list[str]:
    """Write statements that look up a chunk's segment, its first element and the number of its elements."""
    names = [f"{name} = segment[{k}]" for k, name in enumerate(segment_columns(spec))]
    return [
        "const int64_t *segment = segments[chunks[chunk][0]];",
        "const int64_t start = chunks[chunk][1];",
        f"const int64_t {arguments(names, 12)};",
        f"const int count = end - start < {CHUNK} ? (int)(end - start) : {CHUNK};",
    ]


def _load_pointers(spec: KernelSpec, names: Container[str], output_tensors: Container[str]) -> list[str]:
    """Write statements that look up a chunk's pointers to the tensors `names`; they point to the chunk's start."""
    lines = []
    for k, (name, dtype) in enumerate(spec.tensors.items()):
        if name in names:
            pointer_type = f"{'' if name in output_tensors else 'const '}{STORAGE[dtype]} *"
            pointer = f"({pointer_type})pointers[entry_index][{k}] + {_place(spec, name, 'start')}"
            lines.append(f"{pointer_type}restrict {name}_ptr = {pointer};")
    return lines


def _load_scalars(names: Sequence[str]) -> list[str]:
    """Write statements that look up the scalars of a chunk's parameter; `names` are all scalars in the table."""
    return [f"const float {name} = scalars[entry_index * {len(names)} + {k}];" for k, name in enumerate(names)]
