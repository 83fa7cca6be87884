"""The pieces of a rendered Triton kernel: operations, and statements that load rows of tables and elements of tensors.

BF16 is loaded and stored as 16-bit integers, so that neither the compiler nor Triton's interpreter rounds it a second
time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from hf_lowprec.optim.backends.graph_renderer import FLOAT_BITS, INTEGER_BITS, Language, arguments, indent, statements
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ROW_FACTOR, KernelSpec
from hf_lowprec.rounding import quiet_nan, sqrt_rn
from hf_lowprec.rounding.block_floats import BLOCK, block_max
from hf_lowprec.rounding.random_bits import GOLDEN, weyl

# How elements are stored, and how they are converted when they are loaded and stored, by storage dtype.
STORAGE = {
    torch.float32: "float32",
    torch.bfloat16: "uint16",
    torch.float16: "float16",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
LOAD = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)",
    torch.float16: "{0}.to(tl.float32)",
    torch.int16: "{0}.to(tl.int32)",
    torch.int8: "{0}.to(tl.int32)",
    torch.uint8: "{0}.to(tl.int32)",
}
STORE = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)",
    torch.float16: "{0}.to(tl.float16)",
    torch.int16: "{0}.to(tl.int16)",
    torch.int8: "{0}.to(tl.int8)",
    torch.uint8: "{0}.to(tl.uint8)",
}

WHOLE_COLUMNS = ("segment", "start")
RAGGED_COLUMNS = ("entry_index", "segment", "start", "end")
"""The columns of the tables of whole and ragged chunks; `end` is the element after the last."""

FACTORS = {ROW_FACTOR: "row", COLUMN_FACTOR: "column"}
"""The tensors with one element per row or column, and the variable that numbers the element."""


TRITON = Language(
    assign=lambda name, expression, is_float: f"{name} = {expression}",
    number=lambda value, is_float: repr(
        torch.tensor(value, dtype=torch.float32, device="cpu").item() if is_float else int(value)
    ),
    operations={
        operator.truediv: "tl.div_rn({0}, {1})".format,
        operator.rshift: "{0} >> {1}".format,
        torch.where: "tl.where({0}, {1}, {2})".format,
        torch.clamp_min: "tl.maximum({0}, {1})".format,
        torch.clamp_max: "tl.minimum({0}, {1})".format,
        FLOAT_BITS: "{0}.to(tl.float32, bitcast=True)".format,
        INTEGER_BITS: "{0}.to(tl.int32, bitcast=True)".format,
        sqrt_rn: "tl.sqrt_rn({0})".format,
        quiet_nan: "tl.where({0} != {0}, float('nan'), {0})".format,  # NVIDIA's arithmetic gives NaN as 0x7FFFFFFF
        weyl: f"{{0}} * {GOLDEN} + {{1}}".format,
        block_max: "tl.max({0}, axis=1, keep_dims=True)".format,
    },
    of_floats={operator.neg: "{0} * -1.0".format},  # Triton's unary minus is 0 - x, which loses the sign of zero
)
"""Floats are `tl.float32`, and integers `tl.int32`."""


_FORMULA = """

@triton.jit
def {name}(
    {inputs}
):
    # BLOCK elements: the operations traced from {traced}.
{body}
    return {results}
"""


def render_formula(name: str, traced: str, inputs: Sequence[str], graph: fx.Graph, integers: Collection[str]) -> str:
    """Render a function that performs the operations of `graph`, a trace of `traced`."""
    lines, results = statements(graph, TRITON, integers)
    return _FORMULA.format(
        name=name, traced=traced, inputs=arguments(inputs, 4), body=indent(4, lines), results=", ".join(results)
    )


def number_elements(spec: KernelSpec) -> list[str]:
    """Write statements that number the elements that a program handles at once.

    If the spec has tensors with one element per block (scales), `lanes` is a matrix with a row per block, and `blocks`
    is the column that numbers its rows. So a scale is computed, loaded and stored once per block.
    """
    if not spec.per_block_tensors:
        return ["lanes = tl.arange(0, BLOCK)"]
    return [
        f"blocks = tl.arange(0, BLOCK // {BLOCK})[:, None]",
        f"lanes = blocks * {BLOCK} + tl.arange(0, {BLOCK})[None, :]",
    ]


def load_row(table: str, row: str, columns: Sequence[str], names: Collection[str] | None = None) -> list[str]:
    """Write statements that load a row of a table, each column into a variable of its name, or only `names`."""
    return [
        f"{name} = tl.load({table} + {row} * {len(columns)} + {k})"
        for k, name in enumerate(columns)
        if names is None or name in names
    ]


def load_chunk_inputs(spec: KernelSpec, scalars: Sequence[str]) -> list[str]:
    """Write statements that look up a chunk's addresses, at its start, and the scalars of its parameter."""
    lines = load_row("pointers", "entry_index", [f"{name}_address" for name in spec.tensors])
    lines += [
        f"{name}_address += start {f'// {BLOCK}' if name in spec.per_block_tensors else f'* {dtype.itemsize}'}"
        for name, dtype in spec.tensors.items()
        if name not in FACTORS
    ]
    if spec.factored:  # the rest is computed with 32 bits, relative to these rows and columns
        lines += [
            "first_row = start // columns",
            f"{ROW_FACTOR}_address += first_row * 4",
            f"{COLUMN_FACTOR}_address += first_row // rows * columns * 4",
            "first_row, first_column = (first_row % rows).to(tl.int32), (start % columns).to(tl.int32)",
            "rows, columns = rows.to(tl.int32), columns.to(tl.int32)",
        ]
    return lines + load_row("scalars", "entry_index", scalars)


def matrix_inputs(spec: KernelSpec) -> list[str]:
    """Return the variables that say where in a matrix a chunk begins, if the spec has factors of rows and columns."""
    return ["first_row", "first_column", "rows", "columns"] if spec.factored else []


def find_factors(spec: KernelSpec, index: str) -> list[str]:
    """Write statements that find `row` and `column`, the places of the factors of elements that `index` counts."""
    if not spec.factored:
        return []
    return [f"row, column = places_of_factors({index}, {', '.join(matrix_inputs(spec))})"]


def load_elements(spec: KernelSpec, names: Iterable[str], masked: bool) -> str:
    """Write statements that load elements of tensors, FP32 or int32, under a mask or with promised alignment."""
    names = list(names)
    pointers, values, converted = (
        [] if FACTORS.keys().isdisjoint(names) else find_factors(spec, "offset + lanes"),
        [],
        [],
    )
    for name in names:
        dtype, storage = spec.tensors[name], f"tl.pointer_type(tl.{STORAGE[spec.tensors[name]]})"
        if name in FACTORS:
            pointer, mask = f"{name}_address.to({storage})", "mask"
            places = FACTORS[name]
        elif name in spec.per_block_tensors:
            pointer, places, mask = f"({name}_address + offset // {BLOCK}).to({storage})", "blocks", "block_mask"
        else:
            pointer, places, mask = f"({name}_address + offset * {dtype.itemsize}).to({storage})", "lanes", "mask"
            pointer = pointer if masked else f"tl.multiple_of({pointer}, 16)"
        pointers.append(f"{name}_ptr = {pointer} + {places}")
        load = f"tl.load({name}_ptr{f', mask={mask}, other=0' if masked else ''})"
        values.append(f"{name}_stored = {load}")
        converted.append(f"{name} = {LOAD[dtype].format(f'{name}_stored')}")
    return indent(8, pointers + values + converted)
