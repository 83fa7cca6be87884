"""Render a traced step as C.

`torch.fx` records `fused_step` as a graph of scalar operations; each node becomes one C statement in the body of a loop
over elements. Floats are `float`, integers `uint32_t` (defined wrap-around), shifts are arithmetic as in torch. The
compiler must not contract or re-associate: see the flags in `native.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from hf_lowprec.optim.step import Layout, fused_step
from hf_lowprec.rounding import quiet_nan, sqrt_rn
from hf_lowprec.rounding.random import GOLDEN, weyl

CHUNK = 1 << 15
"""Elements per unit of parallel work."""

_INFIX: dict[Callable, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
}
_COMPARE: dict[Callable, str] = {
    operator.gt: ">",
    operator.ge: ">=",
    operator.lt: "<",
    operator.le: "<=",
    operator.eq: "==",
    operator.ne: "!=",
}

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

static inline __attribute__((always_inline)) void element({parameters})
{{
{body}
}}

/* rows: contiguous runs of elements. Per row: pointers[{n_pointers}], scalars[{n_scalars}], keys[{n_words}][2],
   the length and the low word of the first element's global index. chunks: (row, first element). */
void step(int64_t n_chunks, const int64_t (*chunks)[2], void *const *pointers, const float *scalars,
          const uint32_t *keys, const int64_t *lengths, const uint32_t *first_index, int threads)
{{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < n_chunks; c++) {{
        const int64_t row = chunks[c][0], start = chunks[c][1];
        const int64_t left = lengths[row] - start;
        const int n = left < {chunk} ? (int)left : {chunk};
        const uint32_t base = first_index[row] + (uint32_t)start;
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


def trace(layout: Layout) -> fx.Graph:
    """Record `fused_step` of `layout` on symbolic elements; outputs are the weight, then the states in layout order."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def element(name: str) -> fx.Proxy:
        return fx.Proxy(graph.placeholder(name), tracer)

    weight, grad = element("param"), element("grad")
    state = {stored.name: element(stored.name) for stored in layout.states}
    scalars = {name: element(f"scalar_{name}") for name in layout.scalars}
    index = element("index")
    keys = {word: (element(f"key{word}_0"), element(f"key{word}_1")) for word in layout.words}
    new_weight, new_state = fused_step(layout, weight, grad, state, scalars, index, keys)  # type: ignore[arg-type]
    graph.output((new_weight.node, *(new_state[stored.name].node for stored in layout.states)))  # type: ignore[attr-defined]
    graph.eliminate_dead_code()
    return graph


def render(layout: Layout) -> str:
    """The C source of `void step(...)` for one layout."""
    graph = trace(layout)
    tensors = {"param": layout.param_dtype, "grad": layout.grad_dtype, **{s.name: s.dtype for s in layout.states}}
    written = [name for name in tensors if name != "grad"]
    scalars = [f"scalar_{name}" for name in layout.scalars]
    keys = [f"key{word}_{half}" for word in layout.words for half in (0, 1)]
    second_keys = [f"key{word}_1" for word in layout.words]
    weyls = [f"weyl{word}" for word in layout.words]

    prologue = []
    for k, (name, dtype) in enumerate(tensors.items()):
        kind = f"{'' if name in written else 'const '}{_STORAGE[dtype]} *"
        prologue.append(f"{kind}restrict p_{name} = ({kind})pointers[row * {len(tensors)} + {k}] + start;")
    prologue += [f"const float {name} = scalars[row * {len(scalars)} + {k}];" for k, name in enumerate(scalars)]
    prologue += [f"const uint32_t {name} = keys[row * {len(keys)} + {k}];" for k, name in enumerate(keys)]
    prologue += [f"uint32_t weyl{word} = base * {_GOLDEN} + key{word}_0;" for word in layout.words]

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
            loads=_lines(12, [f"const uint32_t two_{name} = ((const pair *)p_{name})[i];" for name in tensors]),
            evens=call([f"as_float(two_{name} << 16)" for name in tensors], suffix="_even"),
            odds=call([f"as_float(two_{name} & 0xffff0000u)" for name in tensors], f" + {_GOLDEN}", "_odd"),
            stores=_lines(
                12,
                [
                    f"((pair *)p_{name})[i] = as_bits(new_{name}_even) >> 16 | as_bits(new_{name}_odd);"
                    for name in written
                ]
                + advance(f"2 * {_GOLDEN}"),
            ),
        )
    return _TEMPLATE.format(
        n_pointers=len(tensors),
        n_scalars=len(scalars),
        n_words=len(layout.words),
        chunk=CHUNK,
        parameters=", ".join(parameters),
        body=_lines(4, _body(graph, written, integers={"index", *keys})),
        prologue=_lines(8, prologue),
        pairs=pairs,
        outputs=", ".join(f"new_{name}" for name in written),
        singles=call([_TO_FLOAT[dtype].format(f"p_{name}[i]") for name, dtype in tensors.items()]),
        stores=_lines(
            12,
            [f"p_{name}[i] = {_FROM_FLOAT[tensors[name]].format('new_' + name)};" for name in written]
            + advance(_GOLDEN),
        ),
    )


def _lines(indent: int, lines: list[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _body(graph: fx.Graph, written: list[str], integers: set[str]) -> list[str]:
    """One C statement per node, then the assignments of the results; inputs are floats, but for `integers`."""
    lines = []
    is_float: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_float[node] = node.name not in integers
        elif node.op == "output":
            results = zip(written, node.args[0], strict=True)
            lines += [f"*new_{name} = {result.name};" for name, result in results]
        else:
            expression, is_float[node] = _expression(node, is_float)
            lines.append(f"const {'float' if is_float[node] else 'uint32_t'} {node.name} = {expression};")
    return lines


def _expression(node: fx.Node, is_float: dict[fx.Node, bool]) -> tuple[str, bool]:
    """The C expression of one node, and whether it is a float."""

    def any_float(operands: Iterable[object]) -> bool:
        return any(is_float[arg] if isinstance(arg, fx.Node) else isinstance(arg, float) for arg in operands)

    floating = any_float(node.args)

    def text(arg: object, as_float: bool = floating) -> str:
        if isinstance(arg, fx.Node):
            return arg.name
        if as_float:
            return f"{float(arg).hex()}f"  # type: ignore[arg-type]
        return f"0x{int(arg) & 0xFFFFFFFF:x}u"  # type: ignore[call-overload]

    args = node.args
    if node.target == "view":
        to_float = args[1] == torch.float32
        return f"{'as_float' if to_float else 'as_bits'}({text(args[0])})", to_float
    if node.target is sqrt_rn:
        return f"sqrtf({text(args[0])})", True
    if node.target is weyl:
        return f"weyl{args[1].name.removeprefix('key').removesuffix('_0')}", False  # type: ignore[union-attr]
    if node.target is quiet_nan:
        return text(args[0]), True  # done on load, see `quiet` in the template
    if node.target is torch.where:
        condition, *branches = args
        floating = any_float(branches)
        return f"{text(condition)} ? {text(branches[0], floating)} : {text(branches[1], floating)}", floating
    if node.target is operator.neg:
        return f"-{text(args[0])}", floating
    if node.target is operator.rshift:
        return f"(uint32_t)((int32_t){text(args[0])} >> {args[1]})", False
    if node.target in _COMPARE:
        cast = "" if floating else "(int32_t)"
        return f"{cast}{text(args[0])} {_COMPARE[node.target]} {cast}{text(args[1])}", False
    if node.target in _INFIX:
        return f"{text(args[0])} {_INFIX[node.target]} {text(args[1])}", floating
    raise NotImplementedError(f"{node.format_node()} has no rendering in C; add it to {__name__}")
