"""Statements in Triton that load what a program needs: rows of tables, and elements of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hf_lowprec.optim.backends.renderer import indent
from hf_lowprec.optim.backends.triton.renderer import LOAD, STORAGE
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding.block_floats import BLOCK

WHOLE_COLUMNS = ("segment", "start")
RAGGED_COLUMNS = ("entry_index", "segment", "start", "end")
"""The columns of the tables of whole chunks and of ragged ones; `end` is the element after the last."""


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
    ]
    return lines + load_row("scalars", "entry_index", scalars)


def load_elements(spec: KernelSpec, names: Iterable[str], masked: bool) -> str:
    """Statements that load elements of these tensors, FP32 or int32, under a mask or with alignment promised."""
    pointers, values, converted = [], [], []
    for name in names:
        dtype, storage = spec.tensors[name], f"tl.pointer_type(tl.{STORAGE[spec.tensors[name]]})"
        if name in spec.per_block_tensors:
            pointer, places, mask = f"({name}_address + offset // {BLOCK}).to({storage})", "blocks", "block_mask"
        else:
            pointer, places, mask = f"({name}_address + offset * {dtype.itemsize}).to({storage})", "lanes", "mask"
            pointer = pointer if masked else f"tl.multiple_of({pointer}, 16)"
        pointers.append(f"{name}_ptr = {pointer} + {places}")
        load = f"tl.load({name}_ptr{f', mask={mask}, other=0' if masked else ''})"
        values.append(f"{name}_stored = {load}")
        converted.append(f"{name} = {LOAD[dtype].format(f'{name}_stored')}")
    return indent(8, pointers + values + converted)
