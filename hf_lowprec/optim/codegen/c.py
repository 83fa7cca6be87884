"""Print a traced step as C: a loop over elements, a statement per operation.

The compiler must not contract or re-associate: see the flags in `c_compiler.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from hf_lowprec.optim.codegen.trace import Renderer, indented, statements, trace, trace_keys, trace_tensor_mean, used
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.optim.step.spec import StepSpec
from hf_lowprec.rounding.random import GOLDEN

CHUNK = 1 << 15
"""Elements that share a look-up in the tables."""
BLOCK = 4
"""Chunks that a thread takes at a time: enough to stream, few enough not to wait long for an interrupted core."""

_GOLDEN = f"0x{GOLDEN & 0xFFFFFFFF:x}u"
_STORAGE = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.float16: "_Float16"}
_TO_FLOAT = {torch.float32: "quiet({0})", torch.bfloat16: "as_float((uint32_t){0} << 16)", torch.float16: "(float){0}"}
_FROM_FLOAT = {torch.float32: "{0}", torch.bfloat16: "(uint16_t)(as_bits({0}) >> 16)", torch.float16: "(_Float16){0}"}

_TEMPLATE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Two neighbouring BF16 values, moved at once; half the moves and no shuffles. */
typedef uint32_t pair __attribute__((aligned(2), may_alias));

static inline float as_float(uint32_t bits) {{ float value; memcpy(&value, &bits, 4); return value; }}
static inline uint32_t as_bits(float value) {{ uint32_t bits; memcpy(&bits, &value, 4); return bits; }}
/* NaNs that this processor makes have an empty low payload; one that was loaded may not. */
static inline float quiet(float value) {{ return value != value ? NAN : value; }}

{keys}
static inline __attribute__((always_inline)) void element({parameters})
{{
{body}
}}

/* chunks: (segment, element to begin with). segments: runs of an entry_index's elements.
   By entry_index: pointers[{n_pointers}], scalars[{n_scalars}], and the steps counted so far. */
void step(int64_t n_chunks, const int64_t (*chunks)[2], const int64_t (*segments)[{n_columns}],
          void *const (*pointers)[{n_pointers}], const float *scalars, const int64_t *counts, int threads)
{{
#pragma omp parallel for schedule(dynamic, {block}) num_threads(threads)
    for (int64_t c = 0; c < n_chunks; c++) {{
        const int64_t *segment = segments[chunks[c][0]];
        const int64_t start = chunks[c][1], {columns};
        const int n = end - start < {chunk} ? (int)(end - start) : {chunk};
        int done = 0;
{prologue}
{pairs}
#pragma GCC ivdep
        for (int i = done; i < n; i++) {{
            float {outputs};
            element({singles});
{stores}
        }}
    }}
}}
"""

_KEYS = """
static inline void segment_keys({parameters})
{{
{body}
}}
"""

_TENSOR_SUM = """
static inline __attribute__((always_inline)) float tensor_mean_term({parameters})
{{
{body}
    return {result};
}}

/* The FP64 sum of `tensor_mean_term` over each chunk; tables as for `step`, but for the scalars, here {n_scalars}. */
void tensor_sum(int64_t n_chunks, const int64_t (*chunks)[2], const int64_t (*segments)[{n_columns}],
             void *const (*pointers)[{n_pointers}], const float *scalars, double *sums, int threads)
{{
#pragma omp parallel for schedule(dynamic, {block}) num_threads(threads)
    for (int64_t c = 0; c < n_chunks; c++) {{
        const int64_t *segment = segments[chunks[c][0]];
        const int64_t start = chunks[c][1], {columns};
        const int n = end - start < {chunk} ? (int)(end - start) : {chunk};
{prologue}
        double sum[{lanes}] = {{0}}, total = 0; /* several, since additions wait for one another */
        int i = 0;
        for (; i + {lanes} <= n; i += {lanes})
            for (int j = 0; j < {lanes}; j++)
                sum[j] += tensor_mean_term({ahead});
        for (; i < n; i++)
            total += tensor_mean_term({single});
        for (int j = 0; j < {lanes}; j++)
            total += sum[j];
        sums[c] = total;
    }}
}}
"""
_LANES = 16

_PAIRS = """\
#pragma GCC ivdep
        for (int i = 0; i < n / 2; i++) {{
            float {even_outputs}, {odd_outputs};
{loads}
            element({evens});
            element({odds});
{stores}
        }}
        done = n / 2 * 2;
"""


class C(Renderer):
    """Floats are `float`, integers `uint32_t` (defined wrap-around)."""

    def assign(self, name: str, expression: str, floating: bool) -> str:
        return f"const {'float' if floating else 'uint32_t'} {name} = {expression};"

    def number(self, value: float, floating: bool) -> str:
        return f"{float(value).hex()}f" if floating else f"0x{int(value) & 0xFFFFFFFF:x}u"

    def compare(self, left: str, sign: str, right: str, floating: bool) -> str:
        return f"{left} {sign} {right}" if floating else f"(int32_t){left} {sign} (int32_t){right}"

    def divide(self, left: str, right: str) -> str:
        return f"{left} / {right}"

    def shift_right(self, value: str, by: int) -> str:
        return f"(uint32_t)((int32_t){value} >> {by})"

    def negative(self, value: str) -> str:
        return f"-{value}"

    def select(self, condition: str, yes: str, no: str) -> str:
        return f"{condition} ? {yes} : {no}"

    def bits(self, value: str, to_float: bool) -> str:
        return f"{'as_float' if to_float else 'as_bits'}({value})"

    def sqrt_rn(self, value: str) -> str:
        return f"sqrtf({value})"

    def quiet_nan(self, value: str) -> str:
        return value  # done on load, see `quiet` in the template

    def weyl(self, index: str, key0: str) -> str:
        return f"weyl{key0.removeprefix('key').removesuffix('_0')}"  # carried along the loop


def render(spec: StepSpec) -> str:
    """The C source of `void step(...)` for one spec, and of `void tensor_sum(...)` if the algorithm has a `tensor_mean`."""
    return _render_step(spec) + ("" if spec.tensor_mean is None else _render_tensor_sum(spec))


def _render_step(spec: StepSpec) -> str:
    tensors, written = spec.tensors, spec.output_tensors
    scalars = [f"scalar_{name}" for name in spec.all_scalars]
    keys = spec.key_names
    second_keys = [f"key{word}_1" for word in spec.random_words]
    lines, results = statements(trace(spec), C(), {"index", *keys})
    weyls = [f"weyl{word}" for word in spec.random_words]

    prologue = _loaded(spec, scalars, written)
    if keys:
        drawn_from = ["(uint32_t)counts[entry_index] + 1", "(uint32_t)index_high", *spec.stream_names]
        prologue.append(f"uint32_t {', '.join(keys)};")
        prologue.append(f"segment_keys({', '.join([*drawn_from, *(f'&{name}' for name in keys)])});")
        prologue.append("const uint32_t base = (uint32_t)(start + shift);")
    prologue += [f"uint32_t weyl{word} = base * {_GOLDEN} + key{word}_0;" for word in spec.random_words]

    parameters = [f"float {name}" for name in [*tensors, *scalars]] + [
        f"uint32_t {name}" for name in [*second_keys, *weyls]
    ]
    parameters += [f"float *new_{name}" for name in written]

    def call(values: list[str], ahead: str = "", suffix: str = "") -> str:
        sequence = [name + ahead for name in weyls]
        return ", ".join([*values, *scalars, *second_keys, *sequence, *(f"&new_{name}{suffix}" for name in written)])

    def advance(step: str) -> list[str]:
        return [f"{name} += {step};" for name in weyls]

    pairs = ""
    if set(tensors.values()) == {torch.bfloat16}:
        pairs = _PAIRS.format(
            even_outputs=", ".join(f"new_{name}_even" for name in written),
            odd_outputs=", ".join(f"new_{name}_odd" for name in written),
            loads=indented(12, [f"const uint32_t two_{name} = ((const pair *)p_{name})[i];" for name in tensors]),
            evens=call([f"as_float(two_{name} << 16)" for name in tensors], suffix="_even"),
            odds=call([f"as_float(two_{name} & 0xffff0000u)" for name in tensors], f" + {_GOLDEN}", "_odd"),
            stores=indented(
                12,
                [
                    f"((pair *)p_{name})[i] = as_bits(new_{name}_even) >> 16 | as_bits(new_{name}_odd);"
                    for name in written
                ]
                + advance(f"2 * {_GOLDEN}"),
            ),
        )
    return _TEMPLATE.format(
        **_sizes(spec, scalars),
        keys=_keys(spec) if keys else "",
        parameters=", ".join(parameters),
        body=indented(4, lines + [f"*new_{name} = {result};" for name, result in zip(written, results, strict=True)]),
        prologue=indented(8, prologue),
        pairs=pairs,
        outputs=", ".join(f"new_{name}" for name in written),
        singles=call([_TO_FLOAT[dtype].format(f"p_{name}[i]") for name, dtype in tensors.items()]),
        stores=indented(
            12,
            [f"p_{name}[i] = {_FROM_FLOAT[tensors[name]].format('new_' + name)};" for name in written]
            + advance(_GOLDEN),
        ),
    )


def _render_tensor_sum(spec: StepSpec) -> str:
    graph = trace_tensor_mean(spec)
    lines, (result,) = statements(graph, C(), ())
    read = used(graph, spec.tensors)
    scalars = [f"scalar_{name}" for name in spec.host_scalars]
    taken = used(graph, scalars)

    def call(index: str) -> str:
        return ", ".join([*(_TO_FLOAT[spec.tensors[name]].format(f"p_{name}[{index}]") for name in read), *taken])

    return _TENSOR_SUM.format(
        parameters=", ".join(f"float {name}" for name in [*read, *taken]),
        body=indented(4, lines),
        result=result,
        **_sizes(spec, scalars),
        prologue=indented(8, _loaded(spec, scalars, ())),
        lanes=_LANES,
        ahead=call("i + j"),
        single=call("i"),
    )


def _loaded(spec: StepSpec, scalars: Sequence[str], written: Collection[str]) -> list[str]:
    """Statements that take a chunk's pointers and scalars from the tables of its entry_index."""
    lines = []
    for k, (name, dtype) in enumerate(spec.tensors.items()):
        kind = f"{'' if name in written else 'const '}{_STORAGE[dtype]} *"
        lines.append(f"{kind}restrict p_{name} = ({kind})pointers[entry_index][{k}] + start;")
    return lines + [
        f"const float {name} = scalars[entry_index * {len(scalars)} + {k}];" for k, name in enumerate(scalars)
    ]


def _keys(spec: StepSpec) -> str:
    """The function that computes the keys of a segment's random words from their streams."""
    inputs = ("step", "index_high", *spec.stream_names)
    lines, results = statements(trace_keys(spec), C(), inputs)
    return _KEYS.format(
        parameters=", ".join(
            [f"uint32_t {name}" for name in inputs] + [f"uint32_t *{name}" for name in spec.key_names]
        ),
        body=indented(4, lines + [f"*{key} = {result};" for key, result in zip(spec.key_names, results, strict=True)]),
    )


def _sizes(spec: StepSpec, scalars: Sequence[str]) -> dict[str, Any]:
    """What both templates are filled in with."""
    names = segment_columns(spec)
    return {
        "n_columns": len(names),
        "n_pointers": len(spec.tensors),
        "n_scalars": len(scalars),
        "chunk": CHUNK,
        "block": BLOCK,
        "columns": ", ".join(f"{name} = segment[{k}]" for k, name in enumerate(names)),
    }
