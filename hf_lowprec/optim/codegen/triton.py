"""Print a traced step as Triton: a kernel over chunks of segments, a statement per operation.

BF16 travels as 16-bit integers, so that neither a compiler nor Triton's interpreter rounds it a second time. Pointers
come from a table, of which the compiler knows nothing; a chunk that is whole and lies on 16-byte boundaries promises
alignment and moves 128 bits at once, any other is masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_lowprec.optim.codegen.trace import Renderer, indented, statements, trace, trace_keys, trace_tensor_mean, used
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.optim.step.spec import StepSpec
from hf_lowprec.rounding.random import GOLDEN

_STORAGE = {torch.float32: "float32", torch.bfloat16: "uint16", torch.float16: "float16"}
_TO_FLOAT = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)",
    torch.float16: "{0}.to(tl.float32)",
}
_FROM_FLOAT = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)",
    torch.float16: "{0}.to(tl.float16)",
}

_TEMPLATE = """\
import triton
import triton.language as tl


@triton.jit
def element({inputs}):
{body}
    return {results}


@triton.jit
def whole({operands}, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for offset in range(0, CHUNK, BLOCK):
        index = base + offset + lanes
{aligned_loads}
        {outputs} = element({inputs})
{aligned_stores}


@triton.jit
def part({operands}, count, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for offset in range(0, count, BLOCK):
        index = base + offset + lanes
        mask = offset + lanes < count
{masked_loads}
        {outputs} = element({inputs})
{masked_stores}


{keys}
@triton.jit
def step(
    chunks, segments, pointers, scalars, counts, enabled, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    # chunks: (segment, element to begin with). segments: runs of an entry_index's elements. By entry_index:
    # pointers[{n_tensors}], scalars[{n_scalars}], and the steps counted so far. enabled: 0 to leave all as it is.
{chunk}
    base = (start + shift).to(tl.int32)
{prologue}
    left = tl.where(tl.load(enabled) != 0, left, 0)
    if (left >= CHUNK) & ((({addresses}) & 15) == 0):
        whole({operands}, CHUNK, BLOCK)
    else:
        part({operands}, tl.minimum(left, CHUNK).to(tl.int32), TAIL)
"""

_KEYS = """

@triton.jit
def segment_keys({inputs}):
{body}
    return {results}
"""

_TENSOR_SUM = """

@triton.jit
def tensor_mean_term({inputs}):
{body}
    return {result}.to(tl.float64)


@triton.jit
def sum_whole({operands}, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for offset in range(0, CHUNK, BLOCK):
{aligned_loads}
        total += tensor_mean_term({inputs})
    return tl.sum(total)


@triton.jit
def sum_part({operands}, count, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for offset in range(0, count, BLOCK):
        mask = offset + lanes < count
{masked_loads}
        total += tl.where(mask, tensor_mean_term({inputs}), 0.0)
    return tl.sum(total)


@triton.jit
def tensor_sum(
    chunks, segments, pointers, scalars, sums, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    # The FP64 sum of `tensor_mean_term` over each chunk; tables as for `step`, but for the scalars, here {n_scalars}.
{chunk}
{prologue}
    if (left >= CHUNK) & ((({addresses}) & 15) == 0):
        tl.store(sums + chunk, sum_whole({operands}, CHUNK, BLOCK))
    else:
        tl.store(sums + chunk, sum_part({operands}, tl.minimum(left, CHUNK).to(tl.int32), TAIL))
"""


class Triton(Renderer):
    """Floats are `tl.float32`, integers `tl.int32`."""

    def assign(self, name: str, expression: str, floating: bool) -> str:
        return f"{name} = {expression}"

    def number(self, value: float, floating: bool) -> str:
        return repr(torch.tensor(value, dtype=torch.float32, device="cpu").item() if floating else int(value))

    def divide(self, left: str, right: str) -> str:
        return f"tl.div_rn({left}, {right})"

    def shift_right(self, value: str, by: int) -> str:
        return f"{value} >> {by}"

    def negative(self, value: str) -> str:
        return f"{value} * -1.0"  # Triton's own minus is 0 - x, which loses the sign of zero

    def select(self, condition: str, yes: str, no: str) -> str:
        return f"tl.where({condition}, {yes}, {no})"

    def bits(self, value: str, to_float: bool) -> str:
        return f"{value}.to(tl.{'float32' if to_float else 'int32'}, bitcast=True)"

    def sqrt_rn(self, value: str) -> str:
        return f"tl.sqrt_rn({value})"

    def quiet_nan(self, value: str) -> str:
        return f"tl.where({value} != {value}, float('nan'), {value})"  # NVIDIA's own NaN is 0x7FFFFFFF

    def weyl(self, index: str, key0: str) -> str:
        return f"{index} * {GOLDEN} + {key0}"


def render(spec: StepSpec) -> str:
    """The Python source of the Triton kernel `step` for one spec, and of `tensor_sum` if the algorithm has a `tensor_mean`."""
    return _render_step(spec) + ("" if spec.tensor_mean is None else _render_tensor_sum(spec))


def _render_step(spec: StepSpec) -> str:
    tensors, written = spec.tensors, spec.output_tensors
    scalars = [f"scalar_{name}" for name in spec.all_scalars]
    keys = spec.key_names
    lines, results = statements(trace(spec), Triton(), {"index", *keys})
    addresses = [f"a_{name}" for name in tensors]

    prologue = _looked_up(spec, scalars)
    if keys:
        words = ["tl.load(counts + entry_index).to(tl.int32) + 1", "index_high.to(tl.int32)"]
        words += [f"{name}.to(tl.int32)" for name in spec.stream_names]
        prologue.append(f"{', '.join(keys)} = segment_keys({', '.join(words)})")

    def stores(mask: str) -> str:
        values = {name: _FROM_FLOAT[tensors[name]].format(f"new_{name}") for name in written}
        return indented(8, [f"tl.store(p_{name}, {value}{mask})" for name, value in values.items()])

    return _TEMPLATE.format(
        inputs=", ".join([*tensors, *scalars, "index", *keys]),
        operands=", ".join(["base", *addresses, *scalars, *keys]),
        addresses=" | ".join(addresses),
        outputs=", ".join(f"new_{name}" for name in written),
        body=indented(4, lines),
        results=", ".join(results),
        n_tensors=len(tensors),
        n_scalars=len(scalars),
        keys=_keys(spec) if keys else "",
        chunk=indented(4, _chunk(spec)),
        prologue=indented(4, prologue),
        aligned_loads=_loads(spec, tensors, ""),
        aligned_stores=stores(""),
        masked_loads=_loads(spec, tensors, ", mask=mask, other=0"),
        masked_stores=stores(", mask=mask"),
    )


def _render_tensor_sum(spec: StepSpec) -> str:
    graph = trace_tensor_mean(spec)
    lines, (result,) = statements(graph, Triton(), ())
    read = used(graph, spec.tensors)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    taken = used(graph, scalars)
    return _TENSOR_SUM.format(
        inputs=", ".join([*read, *taken]),
        operands=", ".join([*(f"a_{name}" for name in read), *taken]),
        body=indented(4, lines),
        result=result,
        n_scalars=len(scalars),
        chunk=indented(4, _chunk(spec)),
        prologue=indented(4, _looked_up(spec, scalars)),
        addresses=" | ".join(f"a_{name}" for name in read),
        aligned_loads=_loads(spec, read, ""),
        masked_loads=_loads(spec, read, ", mask=mask, other=0"),
    )


def _table(name: str, segment: str, entries: Sequence[str]) -> list[str]:
    """Statements that take the entries of one segment of a table."""
    return [f"{entry} = tl.load({name} + {segment} * {len(entries)} + {k})" for k, entry in enumerate(entries)]


def _chunk(spec: StepSpec) -> list[str]:
    """Statements that find out which chunk of which segment a program entries on."""
    return [
        "chunk = tl.program_id(0).to(tl.int64)",
        *_table("chunks", "chunk", ["segment", "start"]),
        *_table("segments", "segment", segment_columns(spec)),
        "left = end - start",
    ]


def _looked_up(spec: StepSpec, scalars: list[str]) -> list[str]:
    """Statements that take the entry_index's addresses and scalars from their tables, the addresses at the chunk's start."""
    lines = _table("pointers", "entry_index", [f"a_{name}" for name in spec.tensors])
    lines += [f"a_{name} += start * {dtype.itemsize}" for name, dtype in spec.tensors.items()]
    return lines + _table("scalars", "entry_index", scalars)


def _keys(spec: StepSpec) -> str:
    """The function that computes the keys of a segment's random words from their streams."""
    inputs = ["step", "index_high", *spec.stream_names]
    lines, results = statements(trace_keys(spec), Triton(), inputs)
    return _KEYS.format(inputs=", ".join(inputs), body=indented(4, lines), results=", ".join(results))


def _loads(spec: StepSpec, names: Iterable[str], mask: str) -> str:
    """Statements that load a block of these tensors: masked, or promising alignment."""
    pointers, values = [], []
    for name in names:
        dtype = spec.tensors[name]
        scalar = f"(a_{name} + offset * {dtype.itemsize}).to(tl.pointer_type(tl.{_STORAGE[dtype]}))"
        pointers.append(f"p_{name} = {scalar if mask else f'tl.multiple_of({scalar}, 16)'} + lanes")
        values.append(f"{name} = {_TO_FLOAT[dtype].format(f'tl.load(p_{name}{mask})')}")
    return indented(8, pointers + values)
