"""Render a traced step as Triton: a program per chunk around one function that performs the traced operations.

BF16 is loaded and stored as 16-bit integers, so that neither the compiler nor Triton's interpreter rounds it a second
time. Addresses come from a table, so the compiler knows nothing about their alignment: the kernel `step` promises it,
which gives 128-bit accesses, and its chunks are those for which the promise holds. All others are stepped by
`step_ragged`, under a mask; see backends/triton_chunks.py.

Whole chunks are computed by functions of their own on NVIDIA GPUs (`PTX`), with divisions, roots, conversions and tests
for NaN in inline PTX. Their bits are the same. Kernels with states in 8 bits have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from hf_lowprec.optim.codegen.fast_paths import DIVISION, ROOT, FastPath
from hf_lowprec.optim.codegen.inline_ptx import ADD_LANE, FROM_BFLOAT16, TO_BFLOAT16, InlinePtx, fast_path, quiet_nans
from hf_lowprec.optim.codegen.ptx_graph import convert_on_use, trace_for_ptx
from hf_lowprec.optim.codegen.renderer import Renderer, arguments, description, indent, statements
from hf_lowprec.optim.codegen.trace import integer_inputs, trace, trace_keys, trace_tensor_mean, used_inputs
from hf_lowprec.optim.step.kernel_spec import StepSpec
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.rounding.random_bits import GOLDEN

# How elements are stored, and how they are converted when they are loaded and stored, by storage dtype.
_STORAGE = {
    torch.float32: "float32",
    torch.bfloat16: "uint16",
    torch.float16: "float16",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
_LOAD = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)",
    torch.float16: "{0}.to(tl.float32)",
    torch.int16: "{0}.to(tl.int32)",
    torch.int8: "{0}.to(tl.int32)",
    torch.uint8: "{0}.to(tl.int32)",
}
_STORE = {
    torch.float32: "{0}",
    torch.bfloat16: "({0}.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)",
    torch.float16: "{0}.to(tl.float16)",
    torch.int16: "{0}.to(tl.int16)",
    torch.int8: "{0}.to(tl.int8)",
    torch.uint8: "{0}.to(tl.uint8)",
}


class TritonRenderer(Renderer):
    """Renders floats as `tl.float32` and integers as `tl.int32`."""

    def assign(self, name: str, expression: str, is_float: bool) -> str:
        return f"{name} = {expression}"

    def number(self, value: float, is_float: bool) -> str:
        return repr(torch.tensor(value, dtype=torch.float32, device="cpu").item() if is_float else int(value))

    def divide(self, left: str, right: str) -> str:
        return f"tl.div_rn({left}, {right})"

    def shift_right(self, value: str, bits: str) -> str:
        return f"{value} >> {bits}"

    def negate(self, value: str) -> str:
        return f"{value} * -1.0"  # Triton's unary minus computes 0 - x, which loses the sign of zero

    def select(self, condition: str, if_true: str, if_false: str) -> str:
        return f"tl.where({condition}, {if_true}, {if_false})"

    def larger(self, left: str, right: str) -> str:
        return f"tl.maximum({left}, {right})"

    def smaller(self, left: str, right: str) -> str:
        return f"tl.minimum({left}, {right})"

    def bitcast(self, value: str, to_float: bool) -> str:
        return f"{value}.to(tl.{'float32' if to_float else 'int32'}, bitcast=True)"

    def sqrt_rn(self, value: str) -> str:
        return f"tl.sqrt_rn({value})"

    def quiet_nan(self, value: str) -> str:
        return f"tl.where({value} != {value}, float('nan'), {value})"  # NVIDIA's arithmetic gives NaN as 0x7FFFFFFF

    def weyl(self, index: str, key0: str) -> str:
        return f"{index} * {GOLDEN} + {key0}"

    def block_max(self, value: str) -> str:
        return f"tl.max({value}, axis=1, keep_dims=True)"


class PtxRenderer(TritonRenderer):
    """Renders divisions, roots, and what concerns NaN and BF16, as calls of functions with inline PTX.

    Attributes:
        functions: the sources of these functions by name.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}

    def divide(self, left: str, right: str) -> str:
        return self._fast_path("inline_divide", DIVISION, "tl.div_rn(a, b)", [left, right])

    def divide_above(self, left: str, right: str, floor: str) -> str:
        return self._fast_path("inline_divide_above", DIVISION, "tl.div_rn(a, b)", [left, right, floor], bounded="b")

    def sqrt_rn(self, value: str) -> str:
        return self._fast_path("inline_sqrt_rn", ROOT, "tl.sqrt_rn(v)", [value])

    def from_bfloat16(self, pattern: str) -> str:
        return self._call("inline_from_bfloat16", FROM_BFLOAT16, [pattern]) + "[0]"

    def to_bfloat16(self, value: str) -> str:
        return self._call("inline_to_bfloat16", TO_BFLOAT16, [value]) + "[0]"

    def add_lane(self, pattern: str, word: str, role: int) -> str:
        return self._call(f"inline_add_lane_{role % 3}", ADD_LANE[role % 3], [pattern, word]) + "[0]"

    def quiet_nans(self, values: Sequence[str], tested: tuple[int, ...]) -> str:
        name = f"inline_quiet_nans_{len(values)}_by_{'_'.join(map(str, tested))}"
        return self._call(name, quiet_nans(len(values), tested), values)

    def _call(self, name: str, ptx: InlinePtx, operands: Sequence[str]) -> str:
        self.functions[name] = _FUNCTION.format(name=name, inputs=", ".join(ptx.inputs), ptx=_inline(ptx))
        return f"{name}({', '.join(operands)})"

    def _fast_path(
        self, name: str, path: FastPath, of_scalars: str, operands: Sequence[str], bounded: str | None = None
    ) -> str:
        single, paired = (fast_path(path, in_pairs, bounded) for in_pairs in (False, True))
        self.functions[name] = _FAST_PATH.format(
            name=name,
            inputs=", ".join(single.inputs),
            last=path.inputs[-1],
            of_scalars=of_scalars,
            single=_inline(single),
            paired=_inline(paired),
        )
        return f"{name}({', '.join(operands)}, PTX)"


_FUNCTION = """

@triton.jit
def {name}({inputs}):
    return {ptx}
"""
_FAST_PATH = """

@triton.jit
def {name}({inputs}, PTX: tl.constexpr):
    if len({last}.shape) == 0:
        return {of_scalars}
    elif PTX >= 100:
        return {paired}[0]
    else:
        return {single}[0]
"""


def _inline(ptx: InlinePtx) -> str:
    """The expression that runs some PTX on the tensors that are called as its inputs, and returns a tuple."""
    dtypes = f"tl.{ptx.dtype}, " * ptx.outputs
    operands = f'"{ptx.constraints}", [{", ".join(ptx.inputs)}], ({dtypes}), is_pure=True, pack={ptx.elements}'
    return f'tl.inline_asm_elementwise("""\n{ptx.assembly}\n""", {operands})'


def render(spec: StepSpec) -> str:
    """The Python source of the kernels `step` and `step_ragged` for `spec` and, if its algorithm has a `tensor_mean`
    formula, of `tensor_sum`.

    The `triton` backend executes it and launches the kernels.
    """
    ptx = PtxRenderer()
    kernels = _render_step(spec, ptx) + ("" if spec.tensor_mean is None else _render_tensor_sum(spec, ptx))
    source = _HEADER.format(description="\n# ".join(description(spec)))
    source += _render_segment_keys(spec) if spec.key_names else ""
    return source + "".join(ptx.functions.values()) + kernels


_HEADER = """\
# {description}

import triton
import triton.language as tl
"""


WHOLE_COLUMNS = ("segment", "start")
RAGGED_COLUMNS = ("entry_index", "segment", "start", "end")
"""The columns of the tables of whole chunks and of ragged ones; `end` is the element after the last."""

_LANES = ["lanes = tl.arange(0, BLOCK)"]
_LANES_BY_BLOCK = [
    f"blocks = tl.arange(0, BLOCK // {BLOCK})[:, None]",
    f"lanes = blocks * {BLOCK} + tl.arange(0, {BLOCK})[None, :]",
]
"""The elements of an iteration. With scales they are a matrix whose rows are blocks, and scales are a column of it: a
scale is computed, loaded and stored once for all of a thread's elements.
"""
_MASKS = ["mask = offset + lanes < count"]
_MASKS_BY_BLOCK = [*_MASKS, f"block_mask = offset + blocks * {BLOCK} < count"]


_SEGMENT_KEYS = """

@triton.jit
def segment_keys({inputs}):
    # This step's keys of the random words, from a segment's stream keys.
{body}
    return {results}
"""


def _render_segment_keys(spec: StepSpec) -> str:
    """Render the function that computes this step's `spec.key_names` from a segment's `spec.stream_names`."""
    inputs = ["step", "index_high", *spec.stream_names]
    lines, results = statements(trace_keys(spec), TritonRenderer(), inputs)
    return _SEGMENT_KEYS.format(inputs=arguments(inputs, 8), body=indent(4, lines), results=", ".join(results))


_FORMULA = """

@triton.jit
def {name}(
    {inputs}, PTX: tl.constexpr
):
    # BLOCK elements: the operations traced from {traced}.
{body}
    return {results}
"""


def _render_formula(
    name: str, traced: str, inputs: Sequence[str], graph: fx.Graph, renderer: Renderer, integers: Collection[str]
) -> str:
    """Render a function that performs the operations of `graph`, which is a trace of `traced`."""
    lines, results = statements(graph, renderer, integers)
    return _FORMULA.format(
        name=name, traced=traced, inputs=arguments(inputs, 4), body=indent(4, lines), results=", ".join(results)
    )


_STEP = """

@triton.jit
def step_chunk(
    {chunk_inputs},
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr
):
{lanes}
    for offset in range(0, CHUNK, BLOCK):
        index = first_index + offset + lanes
{loads}
        if PTX:
            {outputs} = fused_step_ptx(
                {arguments}, PTX
            )
        else:
            {outputs} = fused_step(
                {arguments}, PTX
            )
{stores}


@triton.jit
def step(
    chunks, segments, pointers, scalars, counts, enabled,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr = 0
):
    # One optimizer step of the whole chunks of a fused group; a program computes one chunk.
    #
    # chunks: the segment of each chunk, and its first element in the tensors of the segment's parameter. It has CHUNK
    #     elements, which begin on a 16-byte boundary in all of these tensors.
    # segments: contiguous runs of a parameter's elements, see `Segments` in step/segments.py.
    # By entry_index, for each parameter: {n_pointers} pointers, {n_scalars} scalars, the count of steps so far.
    # enabled: 0 to leave everything as it is.
    # CHUNK: elements per chunk. BLOCK: elements per iteration.
    # PTX: the compute capability, times 10, for which PTX is inlined; 0 if none is.
    chunk = tl.program_id(0).to(tl.int64)
{chunk}
{inputs_of_chunk}
    if tl.load(enabled) != 0:
        step_chunk(
            {chunk_inputs},
            CHUNK, BLOCK, {ptx}
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
    BLOCK: tl.constexpr, PTX: tl.constexpr = 0
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
    if {ptx}:
        {outputs} = fused_step_ptx(
            {ragged_arguments}, PTX
        )
    else:
        {outputs} = fused_step(
            {ragged_arguments}, 0
        )
{ragged_stores}
"""


def _render_step(spec: StepSpec, ptx: PtxRenderer) -> str:
    tensors, output_tensors = spec.tensors, spec.output_tensors
    scalars = [f"scalar_{name}" for name in spec.all_scalars]
    keys = spec.key_names
    columns = segment_columns(spec)

    inputs_of_chunk = _load_chunk_inputs(spec, scalars)
    inputs_of_chunk.append("first_index = (start + shift).to(tl.int32)")
    if keys:
        # Step counts are those before this step, which counts from 1.
        key_inputs = ["tl.load(counts + entry_index).to(tl.int32) + 1", "index_high.to(tl.int32)"]
        key_inputs += [f"{name}.to(tl.int32)" for name in spec.stream_names]
        inputs_of_chunk.append(f"{', '.join(keys)} = segment_keys(\n        {arguments(key_inputs, 8)}\n    )")

    stored = {name: _STORE[dtype].format(f"new_{name}") for name, dtype in output_tensors.items()}
    inputs = [*tensors, *scalars, "index", *keys]
    traced, integers = "`fused_step` in step/fused_step.py", integer_inputs(spec)
    formulas = _render_formula("fused_step", traced, inputs, trace(spec), TritonRenderer(), integers)
    # With states in 8 bits, inline PTX would save 5% of the instructions and take half as many registers again.
    inline = not spec.per_block_tensors
    if inline:
        formulas += _render_formula("fused_step_ptx", traced, inputs, trace_for_ptx(spec), ptx, integers)
    return formulas + _STEP.format(
        arguments=arguments(inputs, 16),
        chunk_inputs=arguments(["first_index", *(f"{name}_address" for name in tensors), *scalars, *keys], 12),
        ptx="PTX" if inline else "0",
        outputs=", ".join(f"new_{name}" for name in output_tensors),
        n_pointers=len(tensors),
        n_scalars=len(scalars),
        chunk=indent(4, [*_load_row("chunks", "chunk", WHOLE_COLUMNS), *_load_row("segments", "segment", columns)]),
        inputs_of_chunk=indent(4, inputs_of_chunk),
        lanes=indent(4, _LANES_BY_BLOCK if spec.per_block_tensors else _LANES),
        loads=_load_elements(spec, tensors, masked=False),
        stores=indent(8, [f"tl.store({name}_ptr, {value})" for name, value in stored.items()]),
        together=_TOGETHER,
        ragged_chunk=indent(4, _load_ragged_chunk(columns)),
        ragged_loads=indent(4, _load_ragged(spec, inline)),
        ragged_arguments=arguments(inputs, 12),
        ragged_stores=indent(4, _store_ragged(spec, stored)),
    )


_TOGETHER = 8
"""Elements of a thread that `step_ragged` loads and stores together: 128 bits of BF16."""


def _load_ragged_chunk(columns: Sequence[str]) -> list[str]:
    """Statements that look up a ragged chunk and what its segment says of it."""
    known = [name for name in columns if name not in RAGGED_COLUMNS]
    return _load_row("chunks", "chunk", RAGGED_COLUMNS) + _load_row("segments", "segment", columns, known)


def _load_ragged(spec: StepSpec, inline: bool) -> list[str]:
    """Statements that load the elements of a ragged chunk, FP32 or int32; with inline PTX, BF16 as it is stored."""
    lines = []
    for name, dtype in spec.tensors.items():
        storage = f"tl.{_STORAGE[dtype]}"
        if name in spec.per_block_tensors:
            pointer = f"{name}_address.to(tl.pointer_type({storage})) + blocks"
            lines.append(f"{name}_stored = tl.load({pointer}, mask=blocks * {BLOCK} < count, other=0)")
        else:
            lines.append(f"{name}_stored = load_ragged({name}_address, lanes, count, {storage})")
    for name, dtype in spec.tensors.items():
        value = _LOAD[dtype].format(f"{name}_stored")
        as_stored = inline and dtype == torch.bfloat16
        lines.append(f"{name} = {f'{name}_stored if PTX else {value}' if as_stored else value}")
    return lines


def _store_ragged(spec: StepSpec, stored: Mapping[str, str]) -> list[str]:
    """Statements that store the new values of a ragged chunk: expressions by tensor."""
    lines = []
    for name, value in stored.items():
        if name in spec.per_block_tensors:
            pointer = f"{name}_address.to(tl.pointer_type(tl.{_STORAGE[spec.tensors[name]]})) + blocks"
            lines.append(f"tl.store({pointer}, {value}, mask=blocks * {BLOCK} < count)")
        else:
            lines.append(f"store_ragged({name}_address, lanes, count, {value})")
    return lines


_TENSOR_SUM = """

from hf_lowprec.optim.backends.triton_square_sum import sum_of_pairs, two_sum


@triton.jit
def sum_aligned_chunk(
    {chunk_inputs},
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr
):
{lanes}
    # Pairs of FP32 numbers, as in `square_sum`, since many GPUs have few units for FP64.
    high = tl.zeros(lanes.shape, tl.float32)
    low = tl.zeros(lanes.shape, tl.float32)
    for offset in range(0, CHUNK, BLOCK):
{aligned_loads}
        if PTX:
            term = tensor_mean_term_ptx({inputs}, PTX)
        else:
            term = tensor_mean_term({inputs}, PTX)
        high, error = two_sum(high, term)
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
        total += tl.where(mask, tensor_mean_term({inputs}, 0).to(tl.float64), 0.0)
    return tl.sum(total)


@triton.jit
def tensor_sum(
    chunks, segments, pointers, scalars, sums,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PTX: tl.constexpr = 0
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
            CHUNK, BLOCK, PTX
        ))
    else:
        tl.store(sums + chunk, sum_masked_chunk(
            {chunk_inputs},
            tl.minimum(remaining, CHUNK).to(tl.int32), TAIL
        ))
"""


def _render_tensor_sum(spec: StepSpec, ptx: PtxRenderer) -> str:
    graph = trace_tensor_mean(spec)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    used_tensors, used_scalars = used_inputs(graph, spec.tensors), used_inputs(graph, scalars)
    addresses, columns = [f"{name}_address" for name in used_tensors], segment_columns(spec)
    inputs, traced = [*used_tensors, *used_scalars], "the algorithm's `tensor_mean` formula"
    formulas = _render_formula("tensor_mean_term", traced, inputs, graph, TritonRenderer(), spec.integer_tensors)
    for_ptx = convert_on_use(trace_tensor_mean(spec), spec)
    formulas += _render_formula("tensor_mean_term_ptx", traced, inputs, for_ptx, ptx, spec.integer_tensors)
    return formulas + _TENSOR_SUM.format(
        inputs=arguments(inputs, 16),
        chunk_inputs=arguments([*addresses, *used_scalars], 12),
        addresses=_aligned(spec, used_tensors),
        n_scalars=len(scalars),
        chunk=indent(4, [*_load_row("chunks", "chunk", WHOLE_COLUMNS), *_load_row("segments", "segment", columns)]),
        inputs_of_chunk=indent(4, _load_chunk_inputs(spec, scalars)),
        lanes=indent(4, _LANES_BY_BLOCK if spec.per_block_tensors else _LANES),
        masks=indent(8, _MASKS_BY_BLOCK if spec.per_block_tensors else _MASKS),
        aligned_loads=_load_elements(spec, used_tensors, masked=False),
        masked_loads=_load_elements(spec, used_tensors, masked=True),
    )


def _load_row(table: str, row: str, columns: Sequence[str], names: Collection[str] | None = None) -> list[str]:
    """Statements that load one row of a table, each column into a variable of its name; with `names`, only these."""
    return [
        f"{name} = tl.load({table} + {row} * {len(columns)} + {k})"
        for k, name in enumerate(columns)
        if names is None or name in names
    ]


def _load_chunk_inputs(spec: StepSpec, scalars: Sequence[str]) -> list[str]:
    """Statements that look up the addresses and scalars of a chunk's parameter; addresses are the chunk's start."""
    lines = _load_row("pointers", "entry_index", [f"{name}_address" for name in spec.tensors])
    lines += [
        f"{name}_address += start {f'// {BLOCK}' if name in spec.per_block_tensors else f'* {dtype.itemsize}'}"
        for name, dtype in spec.tensors.items()
    ]
    return lines + _load_row("scalars", "entry_index", scalars)


def _aligned(spec: StepSpec, names: Iterable[str]) -> str:
    """The addresses that must be multiples of 16 for wide accesses, combined."""
    return " | ".join(f"{name}_address" for name in names if name not in spec.per_block_tensors)


def _load_elements(spec: StepSpec, names: Iterable[str], masked: bool) -> str:
    """Statements that load elements of these tensors, FP32 or int32, under a mask or with alignment promised."""
    pointers, values, converted = [], [], []
    for name in names:
        dtype, storage = spec.tensors[name], f"tl.pointer_type(tl.{_STORAGE[spec.tensors[name]]})"
        if name in spec.per_block_tensors:
            pointer, places, mask = f"({name}_address + offset // {BLOCK}).to({storage})", "blocks", "block_mask"
        else:
            pointer, places, mask = f"({name}_address + offset * {dtype.itemsize}).to({storage})", "lanes", "mask"
            pointer = pointer if masked else f"tl.multiple_of({pointer}, 16)"
        pointers.append(f"{name}_ptr = {pointer} + {places}")
        load = f"tl.load({name}_ptr{f', mask={mask}, other=0' if masked else ''})"
        values.append(f"{name}_stored = {load}")
        value = _LOAD[dtype].format(f"{name}_stored")
        if dtype == torch.bfloat16 and not masked:
            value = f"{name}_stored if PTX else {value}"
        converted.append(f"{name} = {value}")
    return indent(8, pointers + values + converted)
