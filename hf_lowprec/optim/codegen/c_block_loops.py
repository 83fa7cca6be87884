"""Loops over blocks and their elements in C, for steps with states in 8 bits.

`block_loops.py` divides the operations into loops. Each becomes a C loop over the elements of a block, and values that
a later loop needs are kept in arrays of `BLOCK` elements.
"""

from __future__ import annotations

from torch import fx

from hf_lowprec.optim.codegen.block_loops import block_loops
from hf_lowprec.optim.codegen.c_renderer import LOAD, STORE, WEYL_INCREMENT, CRenderer, value_type
from hf_lowprec.optim.codegen.renderer import indent, operations, output_nodes
from hf_lowprec.optim.codegen.trace import integer_inputs, trace
from hf_lowprec.optim.step.kernel_spec import StepSpec
from hf_lowprec.rounding.block_floats import BLOCK

_BLOCKS = """\
        /* The operations traced from `fused_step` in step/fused_step.py, in loops over the elements of a block. */
        for (int block = 0; block < count; block += {block}) {{
{declarations}
{loops}
        }}"""

_BLOCK_LOOP = """\
{before}
#pragma GCC ivdep
            for (int j = 0; j < {block}; j++) {{
{body}
            }}
{after}"""


def render_block_loops(spec: StepSpec) -> str:
    """The loops over a chunk's blocks and their elements, for specs with states in 8 bits. They call no function."""
    graph = trace(spec)
    renderer, names = CRenderer(), list(spec.output_tensors)
    rendered = operations(graph, renderer, integer_inputs(spec))
    results = [result.name for result in output_nodes(graph)]
    weyls = [f"weyl{word}" for word in spec.random_words]
    is_float = {node.name: operation.is_float for node, operation in rendered.items()}
    is_float |= {name: dtype.is_floating_point for name, dtype in spec.tensors.items()}

    def statement(node: fx.Node) -> str:
        return renderer.assign(node.name, *rendered[node])

    def store(position: int, place: str) -> str:
        name = names[position]
        return f"{name}_ptr[{place}] = {STORE[spec.tensors[name]].format(results[position])};"

    def load(name: str, place: str) -> str:
        return renderer.assign(name, LOAD[spec.tensors[name]].format(f"{name}_ptr[{place}]"), is_float[name])

    declarations = [f"const uint32_t first_{name} = {name} + (uint32_t)block * {WEYL_INCREMENT};" for name in weyls]
    declarations += [load(name, f"block / {BLOCK}") for name in spec.tensors if name in spec.per_block_tensors]
    loops = []
    for loop in block_loops(graph, spec.tensors.keys() - spec.per_block_tensors):
        declarations += [f"{value_type(is_float[node.name])} kept_{node.name}[{BLOCK}];" for node in loop.kept]
        before = [*map(statement, loop.before), *(store(k, f"block / {BLOCK}") for k in loop.block_outputs)]
        before += [f"int32_t largest_{node.name} = 0;" for node in loop.maxima]
        body = [f"const uint32_t {name} = first_{name} + (uint32_t)j * {WEYL_INCREMENT};" for name in weyls]
        body += [load(node.name, "block + j") for node in loop.loaded]
        body += [renderer.assign(node.name, f"kept_{node.name}[j]", is_float[node.name]) for node in loop.restored]
        body += map(statement, loop.operations)
        body += [f"kept_{node.name}[j] = {node.name};" for node in loop.kept]
        for node in loop.maxima:
            largest, value = f"largest_{node.name}", f"(int32_t){node.args[0]}"
            body.append(f"{largest} = {value} > {largest} ? {value} : {largest};")
        body += [store(k, "block + j") for k in loop.outputs]
        after = [f"const uint32_t {node.name} = (uint32_t)largest_{node.name};" for node in loop.maxima]
        loops.append(
            _BLOCK_LOOP.format(block=BLOCK, before=indent(12, before), body=indent(16, body), after=indent(12, after))
        )
    return _BLOCKS.format(block=BLOCK, declarations=indent(12, declarations), loops="\n".join(loops))
