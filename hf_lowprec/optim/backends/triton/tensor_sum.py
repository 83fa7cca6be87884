"""Render the sum of an algorithm's `tensor_mean` formula over the elements of each chunk as Triton."""

from __future__ import annotations

from collections.abc import Iterable

from hf_lowprec.optim.backends.renderer import arguments, indent
from hf_lowprec.optim.backends.trace import trace_tensor_mean, used_inputs
from hf_lowprec.optim.backends.triton.loads import (
    WHOLE_COLUMNS,
    load_chunk_inputs,
    load_elements,
    load_row,
    number_elements,
)
from hf_lowprec.optim.backends.triton.renderer import render_formula
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK

_TENSOR_SUM = """

from hf_lowprec.optim.backends.triton.square_sum import sum_of_pairs, two_sum


@triton.jit
def sum_aligned_chunk(
    {chunk_inputs},
    CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
{lanes}
    # Pairs of FP32 numbers, as in `square_sum`, since many GPUs have few units for FP64.
    high = tl.zeros(lanes.shape, tl.float32)
    low = tl.zeros(lanes.shape, tl.float32)
    for offset in range(0, CHUNK, BLOCK):
{aligned_loads}
        high, error = two_sum(high, tensor_mean_term({inputs}))
        low += error
    return sum_of_pairs(high, low, BLOCK)


@triton.jit
def sum_masked_chunk(
    {chunk_inputs},
    count, BLOCK: tl.constexpr
):
{lanes}
    total = tl.zeros(lanes.shape, tl.float64)
    for offset in range(0, count, BLOCK):
{masks}
{masked_loads}
        total += tl.where(mask, tensor_mean_term({inputs}).to(tl.float64), 0.0)
    return tl.sum(total)


@triton.jit
def tensor_sum(
    chunks, segments, pointers, scalars, sums,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    # The FP64 sum of `tensor_mean_term` over each chunk, which has CHUNK elements or ends with its segment. The tables
    # are those of `step`, with {n_scalars} scalars each. TAIL: elements per iteration under a mask.
    chunk = tl.program_id(0).to(tl.int64)
{chunk}
{inputs_of_chunk}
    remaining = end - start
    if (remaining >= CHUNK) & ((({addresses}) & 15) == 0):
        tl.store(sums + chunk, sum_aligned_chunk(
            {chunk_inputs},
            CHUNK, BLOCK
        ))
    else:
        tl.store(sums + chunk, sum_masked_chunk(
            {chunk_inputs},
            tl.minimum(remaining, CHUNK).to(tl.int32), TAIL
        ))
"""


def render_tensor_sum(spec: KernelSpec) -> str:
    """The Python source of the kernel `tensor_sum`, which needs the header of `triton_source.render`.

    Args:
        spec: its algorithm must have a `tensor_mean` formula.
    """
    graph = trace_tensor_mean(spec)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    used_tensors, used_scalars = used_inputs(graph, spec.tensors), used_inputs(graph, scalars)
    addresses, columns = [f"{name}_address" for name in used_tensors], segment_columns(spec)
    inputs, traced = [*used_tensors, *used_scalars], "the algorithm's `tensor_mean` formula"
    formula = render_formula("tensor_mean_term", traced, inputs, graph, spec.integer_tensors)
    return formula + _TENSOR_SUM.format(
        inputs=arguments(inputs, 16),
        chunk_inputs=arguments([*addresses, *used_scalars], 12),
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
    """Statements that say which elements, and which scales, of an iteration are there."""
    masks = ["mask = offset + lanes < count"]
    return [*masks, f"block_mask = offset + blocks * {BLOCK} < count"] if spec.per_block_tensors else masks


def _aligned(spec: KernelSpec, names: Iterable[str]) -> str:
    """The addresses that must be multiples of 16 for wide accesses, combined."""
    return " | ".join(f"{name}_address" for name in names if name not in spec.per_block_tensors)
