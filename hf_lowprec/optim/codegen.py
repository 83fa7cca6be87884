"""Render a traced step as C.

`torch.fx` records `fused_step` as a graph of scalar operations; each node becomes one C statement in the body of a loop
over elements. Floats are `float`, integers `uint32_t` (defined wrap-around), shifts are arithmetic as in torch. The
compiler must not contract or re-associate: see the flags in `native.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from hf_lowprec.optim.step import Layout, fused_step
from hf_lowprec.rounding import sqrt_rn

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

_STORAGE = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.float16: "_Float16"}
_LOAD = {
    torch.float32: "{0}[i]",
    torch.bfloat16: "as_float((uint32_t){0}[i] << 16)",
    torch.float16: "(float){0}[i]",
}
_STORE = {
    torch.float32: "{0}[i] = {1};",
    torch.bfloat16: "{0}[i] = (uint16_t)(as_bits({1}) >> 16);",
    torch.float16: "{0}[i] = (_Float16){1};",
}

_TEMPLATE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {{ float value; memcpy(&value, &bits, 4); return value; }}
static inline uint32_t as_bits(float value) {{ uint32_t bits; memcpy(&bits, &value, 4); return bits; }}

/* rows: contiguous runs of elements. Per row: pointers[{n_pointers}], scalars[{n_scalars}], keys[{n_words}][2], the length
   and the low word of the first element's global index. chunks: (row, first element). */
void step(int64_t n_chunks, const int64_t (*chunks)[2], void *const *pointers, const float *scalars,
          const uint32_t *keys, const int64_t *lengths, const uint32_t *first_index, int threads)
{{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < n_chunks; c++) {{
        const int64_t row = chunks[c][0], start = chunks[c][1];
        const int64_t left = lengths[row] - start;
        const int n = left < {chunk} ? (int)left : {chunk};
        const uint32_t base = first_index[row] + (uint32_t)start;
{prologue}
#pragma omp simd
        for (int i = 0; i < n; i++) {{
            const uint32_t index = base + (uint32_t)i;
{body}
        }}
    }}
}}
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
    tensors = [("param", layout.param_dtype, True), ("grad", layout.grad_dtype, False)]
    tensors += [(stored.name, stored.dtype, True) for stored in layout.states]
    n_pointers, n_scalars, n_words = len(tensors), len(layout.scalars), len(layout.words)

    prologue = [
        f"{'' if written else 'const '}{_STORAGE[dtype]} *restrict p_{name} = "
        f"({'' if written else 'const '}{_STORAGE[dtype]} *)pointers[row * {n_pointers} + {k}] + start;"
        for k, (name, dtype, written) in enumerate(tensors)
    ]
    prologue += [
        f"const float scalar_{name} = scalars[row * {n_scalars} + {k}];" for k, name in enumerate(layout.scalars)
    ]
    prologue += [
        f"const uint32_t key{word}_{half} = keys[(row * {n_words} + {k}) * 2 + {half}];"
        for k, word in enumerate(layout.words)
        for half in (0, 1)
    ]
    body = [f"const float {name} = {_LOAD[dtype].format('p_' + name)};" for name, dtype, _ in tensors]
    is_float = {node: node.name.split("_")[0] not in ("index", "key0", "key1", "key2") for node in graph.nodes}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            expression, is_float[node] = _expression(node, is_float)
            body.append(f"const {'float' if is_float[node] else 'uint32_t'} {node.name} = {expression};")
    (output,) = (node for node in graph.nodes if node.op == "output")
    written = [(name, dtype) for name, dtype, is_written in tensors if is_written]
    body += [
        _STORE[dtype].format("p_" + name, node.name) for (name, dtype), node in zip(written, output.args[0], strict=True)
    ]
    return _TEMPLATE.format(
        n_pointers=n_pointers,
        n_scalars=n_scalars,
        n_words=n_words,
        chunk=CHUNK,
        prologue="\n".join("        " + line for line in prologue),
        body="\n".join("            " + line for line in body),
    )


def _expression(node: fx.Node, is_float: dict[fx.Node, bool]) -> tuple[str, bool]:
    """The C expression of one node, and whether it is a float."""
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    floating = any(is_float[arg] for arg in operands)

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
    if node.target is torch.where:
        condition, *branches = args
        floating = any(is_float[arg] for arg in branches if isinstance(arg, fx.Node))
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
