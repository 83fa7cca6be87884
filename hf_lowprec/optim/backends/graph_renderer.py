"""Render a traced graph as source code: one statement per operation, in the order in which they were traced.

A `Renderer` knows one language's operators and literals. `statements` walks the graph and asks it for each operation.
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import fx

from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import dtype_name, quiet_nan, sqrt_rn
from hf_lowprec.rounding.block_floats import block_max
from hf_lowprec.rounding.random_bits import weyl

_INFIX: dict[Callable, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
}
_COMPARISONS: dict[Callable, str] = {
    operator.gt: ">",
    operator.ge: ">=",
    operator.lt: "<",
    operator.le: "<=",
    operator.eq: "==",
    operator.ne: "!=",
}
_METHODS: dict[Callable, tuple[str, bool]] = {
    sqrt_rn: ("sqrt_rn", True),
    quiet_nan: ("quiet_nan", True),
    operator.truediv: ("divide", True),
    operator.rshift: ("shift_right", False),
    torch.clamp_min: ("larger", False),
    torch.clamp_max: ("smaller", False),
    weyl: ("weyl", False),
    block_max: ("block_max", False),
}
"""Function → the method of `Renderer` with the same operands, and whether its result is a float."""


class Renderer:
    """The operations of a language on FP32 and 32-bit integer scalars; operands are passed as source text.

    Integers wrap around; right shifts and comparisons of integers are signed. Floats follow IEEE 754.
    """

    def assign(self, name: str, expression: str, is_float: bool) -> str:
        """A statement that assigns `expression` to a new variable."""
        raise NotImplementedError

    def number(self, value: float, is_float: bool) -> str:
        """A literal."""
        raise NotImplementedError

    def infix(self, left: str, sign: str, right: str) -> str:
        """Addition, subtraction, multiplication, left shift or a bitwise operation."""
        return f"{left} {sign} {right}"

    def compare(self, left: str, sign: str, right: str, is_float: bool) -> str:
        """A comparison of two floats or two integers."""
        return f"{left} {sign} {right}"

    def divide(self, left: str, right: str) -> str:
        """The correctly rounded quotient of two floats."""
        raise NotImplementedError

    def shift_right(self, value: str, bits: str) -> str:
        """An integer, shifted arithmetically."""
        raise NotImplementedError

    def negate(self, value: str) -> str:
        """A float with its sign flipped, that of zero included."""
        raise NotImplementedError

    def select(self, condition: str, if_true: str, if_false: str) -> str:
        """One of two values, by a condition."""
        raise NotImplementedError

    def larger(self, left: str, right: str) -> str:
        """The larger of two integers."""
        raise NotImplementedError

    def smaller(self, left: str, right: str) -> str:
        """The smaller of two integers."""
        raise NotImplementedError

    def bitcast(self, value: str, to_float: bool) -> str:
        """The same 32 bits, as a float or as an integer."""
        raise NotImplementedError

    def sqrt_rn(self, value: str) -> str:
        """The correctly rounded square root of a float."""
        raise NotImplementedError

    def quiet_nan(self, value: str) -> str:
        """A float; if it is NaN, the one without a payload. See `rounding.quiet_nan`."""
        raise NotImplementedError

    def weyl(self, index: str, key0: str) -> str:
        """The integer `index · GOLDEN + key0`. See `rounding.random_bits.weyl`."""
        raise NotImplementedError

    def block_max(self, value: str) -> str:
        """The largest integer of the block. See `rounding.block_floats.block_max`."""
        raise NotImplementedError


class Operation(NamedTuple):
    """A rendered operation: its expression, and whether the result is a float."""

    expression: str
    is_float: bool


def statements(graph: fx.Graph, renderer: Renderer, integers: Collection[str]) -> tuple[list[str], list[str]]:
    """Render every operation of `graph`.

    Args:
        graph: from `trace.py`.
        renderer: the language.
        integers: names of the inputs that are integers; all other inputs are floats.

    Returns:
        The statements, and the names of the variables that hold the graph's outputs.

    Raises:
        NotImplementedError: an operation has no rendering.
    """
    rendered = operations(graph, renderer, integers)
    lines = [renderer.assign(node.name, *operation) for node, operation in rendered.items()]
    return lines, [result.name for result in output_nodes(graph)]


def operations(graph: fx.Graph, renderer: Renderer, integers: Collection[str]) -> dict[fx.Node, Operation]:
    """Render every operation of `graph`, in order. Arguments and errors are those of `statements`."""
    rendered: dict[fx.Node, Operation] = {}
    is_float: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_float[node] = node.name not in integers
        elif node.op != "output":
            rendered[node] = Operation(*_expression(node, is_float, renderer))
            is_float[node] = rendered[node].is_float
    return rendered


def output_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes of the graph's outputs, in order."""
    (outputs,) = graph.output_node().args
    return cast(tuple[fx.Node, ...], outputs)


def _expression(node: fx.Node, is_float: dict[fx.Node, bool], renderer: Renderer) -> tuple[str, bool]:
    """Render the operation of one node; also return whether its result is a float.

    Args:
        node: the operation.
        is_float: whether the result is a float, for each earlier node.
        renderer: the language.
    """

    def any_float(operands: Sequence[object]) -> bool:
        return any(is_float[arg] if isinstance(arg, fx.Node) else isinstance(arg, float) for arg in operands)

    def text(arg: object, as_float: bool) -> str:
        return arg.name if isinstance(arg, fx.Node) else renderer.number(arg, as_float)  # type: ignore[arg-type]

    args, target = node.args, node.target
    if target is torch.where:
        condition, *branches = args
        floats = any_float(branches)
        return renderer.select(text(condition, False), *(text(branch, floats) for branch in branches)), floats

    floats = any_float(args)
    operands = [text(arg, floats) for arg in args if isinstance(arg, fx.Node | int | float)]
    if target == "view":
        return renderer.bitcast(operands[0], args[1] is torch.float32), args[1] is torch.float32
    if target is operator.neg and floats:
        return renderer.negate(operands[0]), True
    if target in _METHODS:
        method, result_is_float = _METHODS[target]
        return getattr(renderer, method)(*operands), result_is_float
    if target in _COMPARISONS:
        return renderer.compare(operands[0], _COMPARISONS[target], operands[1], floats), False
    if target in _INFIX:
        return renderer.infix(operands[0], _INFIX[target], operands[1]), floats
    raise NotImplementedError(f"{node.format_node()} has no rendering; add it to {__name__}")


def description(spec: KernelSpec) -> list[str]:
    """Lines that say what a kernel of `spec` computes, for the comment at the top of its source."""
    options = ", ".join(f"{name}={value}" for name, value in spec.options)
    stochastic = {state.name for state in spec.states if state.stochastic}
    tensors = [
        f"{name} {dtype_name(dtype)}{' (stochastic rounding)' if name in stochastic else ''}"
        for name, dtype in spec.tensors.items()
    ]
    return textwrap.wrap(
        f"Generated by hf_lowprec: {spec.update.__qualname__}({options}), rounding={spec.rounding!r}. "
        f"Tensors: {', '.join(tensors)}.",
        110,
    )


def indent(spaces: int, lines: Iterable[str]) -> str:
    """`lines` of source code, indented and joined."""
    return "\n".join(" " * spaces + line for line in lines)


def arguments(names: Iterable[str], spaces: int) -> str:
    """A comma-separated list of parameters or arguments, wrapped; continuation lines are indented by `spaces`."""
    lines, width = [""], 110 - spaces
    for name in names:
        if not lines[-1]:
            lines[-1] = name
        elif len(lines[-1]) + len(name) < width:
            lines[-1] += f", {name}"
        else:
            lines[-1] += ","
            lines.append(name)
    return f"\n{' ' * spaces}".join(lines)
