"""Statements in Triton that load what a program needs: rows of tables, and elements of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hf_lowprec.optim.backends.renderer import indent
from hf_lowprec.optim.backends.triton.renderer import LOAD, STORAGE
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ROW_FACTOR, KernelSpec
from hf_lowprec.rounding.block_floats import BLOCK

WHOLE_COLUMNS = ("segment", "start")
RAGGED_COLUMNS = ("entry_index", "segment", "start", "end")
"""The columns of the tables of whole chunks and of ragged ones; `end` is the element after the last."""

FACTORS = {ROW_FACTOR: "row", COLUMN_FACTOR: "column"}
"""The tensors with one element per row or column, and the variable that numbers the element."""


def number_elements(spec: KernelSpec) -> list[str]:
    """Statements that number the elements that a program handles at once.

    If the spec has tensors with one element per block, which are scales, `lanes` is a matrix with a row per block, and
    `blocks` is the column that numbers its rows. So a scale is computed, loaded and stored once per block.
    """
    if not spec.per_block_tensors:
        return ["lanes = tl.arange(0, BLOCK)"]
    return [
        f"blocks = tl.arange(0, BLOCK // {BLOCK})[:, None]",
        f"lanes = blocks * {BLOCK} + tl.arange(0, {BLOCK})[None, :]",
    ]


def load_row(table: str, row: str, columns: Sequence[str], names: Collection[str] | None = None) -> list[str]:
    """Statements that load one row of a table, each column into a variable of its name; with `names`, only these."""
    return [
        f"{name} = tl.load({table} + {row} * {len(columns)} + {k})"
        for k, name in enumerate(columns)
        if names is None or name in names
    ]


def load_chunk_inputs(spec: KernelSpec, scalars: Sequence[str]) -> list[str]:
    """Statements that look up the addresses and scalars of a chunk's parameter; addresses are the chunk's start."""
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
    """Names of the variables that say where in a matrix a chunk begins, if the spec has factors of rows and columns."""
    return ["first_row", "first_column", "rows", "columns"] if spec.factored else []


def find_factors(spec: KernelSpec, index: str) -> list[str]:
    """Statements that find `row` and `column`, the places of the factors of elements that `index` counts."""
    if not spec.factored:
        return []
    return [f"row, column = places_of_factors({index}, {', '.join(matrix_inputs(spec))})"]


def load_elements(spec: KernelSpec, names: Iterable[str], masked: bool) -> str:
    """Statements that load elements of these tensors, FP32 or int32, under a mask or with alignment promised."""
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
