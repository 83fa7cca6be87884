"""The step as a graph of scalar operations, and how a target language writes it down.

`torch.fx` records `fused_step` once per spec, and the `tensor_mean` formula if there is one; `c_source.py` and `triton_source.py`
print the record, a statement per operation. So a formula exists once, as torch code, and no backend can differ from
another by more than its arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from hf_lowprec.optim.step.fused import evaluate, fused_step
from hf_lowprec.optim.step.spec import StepSpec
from hf_lowprec.rounding import quiet_nan, sqrt_rn, step_keys
from hf_lowprec.rounding.random import weyl

_INFIX: dict[Callable, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
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


class Renderer:
    """How a language writes operations on FP32 and 32-bit integer scalars; operands come as text.

    Integers wrap around, their shifts to the right and their comparisons are signed; floats follow IEEE 754.
    """

    def assign(self, name: str, expression: str, floating: bool) -> str:
        """The statement that names a result."""
        raise NotImplementedError

    def number(self, value: float, floating: bool) -> str:
        """A literal."""
        raise NotImplementedError

    def infix(self, left: str, sign: str, right: str) -> str:
        """Addition, subtraction, multiplication and the bitwise operations."""
        return f"{left} {sign} {right}"

    def compare(self, left: str, sign: str, right: str, floating: bool) -> str:
        """A comparison."""
        return f"{left} {sign} {right}"

    def divide(self, left: str, right: str) -> str:
        """The correctly rounded quotient of floats."""
        raise NotImplementedError

    def shift_right(self, value: str, by: int) -> str:
        """The arithmetic shift of an integer."""
        raise NotImplementedError

    def negative(self, value: str) -> str:
        """A float with its sign flipped, zeros included."""
        raise NotImplementedError

    def select(self, condition: str, yes: str, no: str) -> str:
        """One of two values."""
        raise NotImplementedError

    def bits(self, value: str, to_float: bool) -> str:
        """The same 32 bits as a float or as an integer."""
        raise NotImplementedError

    def sqrt_rn(self, value: str) -> str:
        """The correctly rounded square root."""
        raise NotImplementedError

    def quiet_nan(self, value: str) -> str:
        """`value`, a NaN without its payload."""
        raise NotImplementedError

    def weyl(self, index: str, key0: str) -> str:
        """`index · GOLDEN + key0`, an integer."""
        raise NotImplementedError


def trace(spec: StepSpec) -> fx.Graph:
    """Record `fused_step` of `spec` on symbolic elements; outputs are the weight, then the states in spec order."""
    element = _Elements()
    weight, grad, state, scalars = element.tensors(spec.tensors, spec.all_scalars)
    index = element("index")
    keys = dict(zip(spec.random_words, _pairs(spec.key_names, element), strict=True))
    new_weight, new_state = fused_step(spec, weight, grad, state, scalars, index, keys)
    return element.graph_of([new_weight, *(new_state[stored.name] for stored in spec.states)])


def trace_keys(spec: StepSpec) -> fx.Graph:
    """Record `step_keys` on a segment's streams, `step` and `index_high`; outputs are the keys of each random word."""
    element = _Elements()
    step, index_high = element("step"), element("index_high")
    return element.graph_of(
        [key for halves in _pairs(spec.stream_names, element) for key in step_keys(*halves, step, index_high)]
    )


def trace_tensor_mean(spec: StepSpec) -> fx.Graph:
    """Record the algorithm's `tensor_mean` formula on symbolic elements; the output is its value."""
    assert spec.tensor_mean is not None
    element = _Elements()
    return element.graph_of([evaluate(spec.tensor_mean, spec, *element.tensors(spec.tensors, spec.host_scalars))])


def _pairs(names: Sequence[str], element: _Elements) -> list[tuple[Any, Any]]:
    """Symbolic elements of these names, two and two."""
    return [(element(first), element(second)) for first, second in zip(names[::2], names[1::2], strict=True)]


def used(graph: fx.Graph, names: Iterable[str]) -> list[str]:
    """Those of `names` that are inputs which `graph` computes from."""
    computed_from = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    return [name for name in names if name in computed_from]


class _Elements:
    """Makes the symbolic elements of a recording."""

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self._graph)

    def __call__(self, name: str) -> Any:
        return fx.Proxy(self._graph.placeholder(name), self._tracer)

    def tensors(self, names: Iterable[str], factors: Iterable[str]) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """Weight, gradient, other tensors and scalars."""
        tensors = {name: self(name) for name in names}
        weight, grad = tensors.pop("param"), tensors.pop("grad")
        return weight, grad, tensors, {name: self(f"scalar_{name}") for name in factors}

    def graph_of(self, results: Sequence[Any]) -> fx.Graph:
        """The record of what was computed to get `results`."""
        self._graph.output(tuple(result.node for result in results))
        self._graph.eliminate_dead_code()
        return self._graph


def statements(graph: fx.Graph, dialect: Renderer, integers: Collection[str]) -> tuple[list[str], list[str]]:
    """A statement per operation of `graph`, in order, and the names of its results.

    Args:
        graph: from `trace`.
        dialect: the language.
        integers: names of the inputs that are integers; the others are floats.
    """
    lines: list[str] = []
    results: list[str] = []
    is_float: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_float[node] = node.name not in integers
        elif node.op == "output":
            results = [result.name for result in node.args[0]]
        else:
            expression, is_float[node] = _expression(node, is_float, dialect)
            lines.append(dialect.assign(node.name, expression, is_float[node]))
    return lines, results


def indented(by: int, lines: Sequence[str]) -> str:
    """Lines of source, `by` spaces in."""
    return "\n".join(" " * by + line for line in lines)


def _expression(node: fx.Node, is_float: dict[fx.Node, bool], dialect: Renderer) -> tuple[str, bool]:
    """The expression of one node, and whether it is a float."""

    def any_float(operands: Sequence[object]) -> bool:
        return any(is_float[arg] if isinstance(arg, fx.Node) else isinstance(arg, float) for arg in operands)

    def text(arg: object, floating: bool) -> str:
        return arg.name if isinstance(arg, fx.Node) else dialect.number(arg, floating)  # type: ignore[arg-type]

    args, target = node.args, node.target
    if target is torch.where:
        condition, *branches = args
        floating = any_float(branches)
        return dialect.select(text(condition, False), *(text(branch, floating) for branch in branches)), floating

    floating = any_float(args)
    operands = [text(arg, floating) for arg in args if isinstance(arg, fx.Node | int | float)]
    if target == "view":
        return dialect.bits(operands[0], args[1] == torch.float32), args[1] == torch.float32
    if target is sqrt_rn:
        return dialect.sqrt_rn(operands[0]), True
    if target is quiet_nan:
        return dialect.quiet_nan(operands[0]), True
    if target is weyl:
        return dialect.weyl(*operands), False
    if target is operator.neg and floating:
        return dialect.negative(operands[0]), True
    if target is operator.truediv:
        return dialect.divide(*operands), True
    if target is operator.rshift:
        return dialect.shift_right(operands[0], int(args[1])), False  # type: ignore[arg-type]
    if target in _COMPARE:
        return dialect.compare(operands[0], _COMPARE[target], operands[1], floating), False
    if target in _INFIX:
        return dialect.infix(operands[0], _INFIX[target], operands[1]), floating
    raise NotImplementedError(f"{node.format_node()} has no rendering; add it to {__name__}")
