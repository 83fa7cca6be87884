"""Loops over blocks and their elements in C, for steps with states in 8 bits.

A block's scale depends on all of its elements, so a loop over them has to end before the next begins. Each use of
`block_max` ends a loop. Each loop becomes a C loop over the pairs of adjacent elements of a block, and values that a
later loop needs are kept in arrays of one number per pair.

Every number in these loops has 32 bits, so that compilers use the widest vectors. If two vectors hold a block, each
loop is one iteration and the arrays are registers. Pairs in 8 bits are converted in separate loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from hf_lowprec.optim.backends.c.c_language import (
    LOAD,
    LOAD_EVEN,
    LOAD_ODD,
    STORE,
    STORE_PAIR,
    WEYL_INCREMENT,
    C,
    value_type,
)
from hf_lowprec.optim.backends.graph_renderer import indent, operations, output_nodes
from hf_lowprec.optim.backends.trace import integer_inputs, trace
from hf_lowprec.optim.step.kernel_spec import ROW_FACTOR, KernelSpec
from hf_lowprec.rounding.block_floats import BLOCK, block_max
from hf_lowprec.rounding.random_bits import weyl


@dataclass
class BlockLoop:
    """One loop over the elements of a block.

    Attributes:
        before: operations with one result for the whole block, computed before the loop.
        operations: operations that are performed for each element.
        maxima: operations `block_max` whose operands this loop computes.
        loaded: inputs that differ between elements, all in the first loop.
        kept: values of elements that later loops need, computed or loaded in this one.
        restored: values of elements that this loop needs, computed or loaded in earlier ones.
        outputs: positions of the graph's outputs that are known for each element in this loop.
        block_outputs: positions of the graph's outputs with one value per block, known before this loop.
    """

    before: list[fx.Node] = field(default_factory=list)
    operations: list[fx.Node] = field(default_factory=list)
    maxima: list[fx.Node] = field(default_factory=list)
    loaded: list[fx.Node] = field(default_factory=list)
    kept: list[fx.Node] = field(default_factory=list)
    restored: list[fx.Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    block_outputs: list[int] = field(default_factory=list)


def block_loops(graph: fx.Graph, elements: Collection[str]) -> list[BlockLoop]:
    """Divide the operations of `graph` into loops.

    Args:
        graph: from `trace`.
        elements: names of the inputs that differ from element to element.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    operations = [node for node in graph.nodes if node.op == "call_function" or node.op == "call_method"]
    results = output_nodes(graph)
    varies = {node: node.name in elements for node in inputs}
    from_tensors = dict(varies)
    loop = dict.fromkeys(inputs, 0)
    for node in operations:
        args = node.all_input_nodes
        is_max = node.target is block_max
        varies[node] = not is_max and (node.target is weyl or any(varies[arg] for arg in args))
        from_tensors[node] = any(from_tensors[arg] for arg in args)
        loop[node] = max((loop[arg] for arg in args), default=0) + is_max

    def loops_of_users(node: fx.Node) -> list[int]:
        """Return the loops that read a value; a maximum is computed in the loop before the one that uses it."""
        return [loop[user] - (user.target is block_max) for user in node.users if user in loop]

    for node in reversed(operations):
        # Random words are computed where they are first used, instead of being kept from an earlier loop. So are
        # values that follow from one other value of the element: keeping that one costs no more.
        users = loops_of_users(node)
        follows_from_one = varies[node] and sum(varies[arg] for arg in node.all_input_nodes) == 1
        if users and (not from_tensors[node] or follows_from_one):
            loop[node] = max(loop[node], min(users))

    loops = [BlockLoop() for _ in range(max(loop.values()) + 1)]
    for node in operations:
        part = loops[loop[node]]
        if node.target is block_max:
            loops[loop[node] - 1].maxima.append(node)
        else:
            (part.operations if varies[node] else part.before).append(node)
    for node in filter(varies.__getitem__, [*inputs, *operations]):
        first = loop[node]
        uses = {*loops_of_users(node), *([first] if node in results else [])}
        if node.op == "placeholder" and uses:
            loops[first].loaded.append(node)  # before an output overwrites it
        later = sorted(use for use in uses if use > first)
        if later:
            loops[first].kept.append(node)
        for use in later:
            loops[use].restored.append(node)
    for position, node in enumerate(results):
        part = loops[loop[node]]
        (part.outputs if varies[node] else part.block_outputs).append(position)
    return loops


_PAIRS = BLOCK // 2
_PARITIES = ("even", "odd")

_LOOP_OVER_BLOCKS = """\
        /* The operations traced from `fused_step` in step/fused_step.py, in loops over the pairs of a block. */
        for (int block = 0; block < count; block += {block}) {{
{declarations}
{loops}
{stores}
        }}"""

_PAIR_LOOP = """\
{before}
#pragma GCC ivdep
            for (int j = 0; j < {pairs}; j++) {{
{loads}
                {{ /* the even element */
{even}
                }}
                {{ /* the odd element */
{odd}
                }}
{stores}
            }}
{after}"""

_FOR_EACH_PAIR = f"for (int j = 0; j < {_PAIRS}; j++)"
_BYTE_PAIR_J = "((byte_pair *)({0}_ptr + block))[j]"
_PAIR = "((pair *)({0}_ptr + block))[j]"

# The two elements of a pair of bytes. `decode` takes codes without their sign as well.
_LOAD_CODES = ("{0} & 0xffu", "{0} >> 8")
_LOAD_BYTES = ("(uint32_t)((int32_t)({0} << 24) >> 24)", "(uint32_t)((int32_t)({0} << 16) >> 24)")
_STORE_BYTES = "({0} & 0xffu) | {1} << 8"


def render_block_loops(spec: KernelSpec) -> str:
    """Render the loops over a chunk's blocks and elements, for specs with states in 8 bits. They call no function."""
    return _BlockRenderer(spec).render()


class _BlockRenderer:
    """Renders the loops of a spec. Every loop has the operations of both elements of a pair, in separate scopes."""

    def __init__(self, spec: KernelSpec) -> None:
        graph = trace(spec)
        self._spec = spec
        self._rendered = operations(graph, C, integer_inputs(spec))
        self._output_names = list(spec.output_tensors)
        self._output_values = [result.name for result in output_nodes(graph)]
        self._elements = [name for name in spec.tensors if name not in (*spec.per_block_tensors, ROW_FACTOR)]
        self._in_8_bits = [name for name in self._elements if spec.tensors[name] == torch.int8]
        self._in_16_bits = [name for name in self._elements if spec.tensors[name] in STORE_PAIR]
        self._is_float = {node.name: operation.is_float for node, operation in self._rendered.items()}
        self._is_float |= {name: dtype.is_floating_point for name, dtype in spec.tensors.items()}
        self._loops = block_loops(graph, set(self._elements))

    def render(self) -> str:
        """Render the C loop over a chunk's blocks: declarations, a C loop per `BlockLoop`, stores of 8-bit states."""
        declarations = [
            f"const uint32_t first_weyl{word} = weyl{word} + (uint32_t)block * {WEYL_INCREMENT};"
            for word in self._spec.random_words
        ]
        declarations += [self._load(name, f"block / {BLOCK}") for name in sorted(self._spec.per_block_tensors)]
        declarations += [self._load(ROW_FACTOR, "0")] if self._spec.factored else []
        for name in self._in_8_bits:
            declarations.append(f"uint32_t {name}_pairs[{_PAIRS}], new_{name}_pairs[{_PAIRS}];")
            declarations.append(f"{_FOR_EACH_PAIR} {name}_pairs[j] = {_BYTE_PAIR_J.format(name)};")
        for node in (node for loop in self._loops for node in loop.kept):
            arrays = ", ".join(f"kept_{node.name}_{parity}[{_PAIRS}]" for parity in _PARITIES)
            declarations.append(f"{self._type(node.name)} {arrays};")
        return _LOOP_OVER_BLOCKS.format(
            block=BLOCK,
            declarations=indent(12, declarations),
            loops="\n".join(map(self._loop, self._loops)),
            stores=indent(
                12, [f"{_FOR_EACH_PAIR} {_BYTE_PAIR_J.format(n)} = new_{n}_pairs[j];" for n in self._in_8_bits]
            ),
        )

    def _loop(self, loop: BlockLoop) -> str:
        spec, outputs = self._spec, [self._output_names[position] for position in loop.outputs]
        before = [*self._statements(loop.before), *(self._store_scale(position) for position in loop.block_outputs)]
        before += [f"int32_t largest_{node.name} = 0;" for node in loop.maxima]
        loaded = [node.name for node in loop.loaded]
        loads = [f"const uint32_t {name}_pair = {_PAIR.format(name)};" for name in loaded if name in self._in_16_bits]
        loads += [f"const uint32_t {name}_pair = {name}_pairs[j];" for name in loaded if name in self._in_8_bits]
        loads += [f"{self._type(name)} new_{name}_even, new_{name}_odd;" for name in outputs]
        stores = []
        for name in outputs:
            new = [f"new_{name}_{parity}" for parity in _PARITIES]
            if name in self._in_16_bits:
                stores.append(f"{_PAIR.format(name)} = {STORE_PAIR[spec.tensors[name]].format(*new)};")
            elif name in self._in_8_bits:
                stores.append(f"new_{name}_pairs[j] = {_STORE_BYTES.format(*new)};")
            else:
                stored = [STORE[spec.tensors[name]].format(value) for value in new]
                stores += [f"{name}_ptr[block + 2 * j + {k}] = {value};" for k, value in enumerate(stored)]
        even, odd = (self._element(loop, k) for k in (0, 1))
        return _PAIR_LOOP.format(
            pairs=_PAIRS,
            before=indent(12, before),
            loads=indent(16, loads),
            even=indent(20, even),
            odd=indent(20, odd),
            stores=indent(16, stores),
            after=indent(12, [f"const uint32_t {node.name} = (uint32_t)largest_{node.name};" for node in loop.maxima]),
        )

    def _element(self, loop: BlockLoop, k: int) -> list[str]:
        """Return the operations on one element of a pair: the even one if `k` is 0, the odd one if it is 1."""
        parity = _PARITIES[k]
        lines = [
            f"const uint32_t weyl{word} = first_weyl{word} + (uint32_t)(2 * j + {k}) * {WEYL_INCREMENT};"
            for word in self._spec.random_words
        ]
        lines += [self._load_element(node.name, k) for node in loop.loaded]
        lines += [self._assign(node.name, f"kept_{node.name}_{parity}[j]") for node in loop.restored]
        lines += self._statements(loop.operations)
        lines += [f"kept_{node.name}_{parity}[j] = {node.name};" for node in loop.kept]
        for node in loop.maxima:
            largest, value = f"largest_{node.name}", f"(int32_t){node.args[0]}"
            lines.append(f"{largest} = {value} > {largest} ? {value} : {largest};")
        return lines + [
            f"new_{self._output_names[position]}_{parity} = {self._output_values[position]};"
            for position in loop.outputs
        ]

    def _load_element(self, name: str, k: int) -> str:
        pair = f"{name}_pair"
        if name in self._in_16_bits:
            return self._assign(name, (LOAD_EVEN, LOAD_ODD)[k][self._spec.tensors[name]].format(pair))
        if name in self._in_8_bits:
            return self._assign(name, (_LOAD_CODES if name in self._spec.scales else _LOAD_BYTES)[k].format(pair))
        return self._load(name, f"block + 2 * j + {k}")

    def _load(self, name: str, place: str) -> str:
        return self._assign(name, LOAD[self._spec.tensors[name]].format(f"{name}_ptr[{place}]"))

    def _store_scale(self, position: int) -> str:
        name, result = self._output_names[position], self._output_values[position]
        return f"{name}_ptr[block / {BLOCK}] = {STORE[self._spec.tensors[name]].format(result)};"

    def _statements(self, nodes: Iterable[fx.Node]) -> list[str]:
        return [C.assign(node.name, *self._rendered[node]) for node in nodes]

    def _assign(self, name: str, expression: str) -> str:
        return C.assign(name, expression, self._is_float[name])

    def _type(self, name: str) -> str:
        return value_type(self._is_float[name])
