"""Render a traced graph as source code: one statement per operation, in the order in which they were traced.

A `Language` says how one language writes each operation. `statements` walks the graph and looks it up.
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import dtype_name, quiet_nan, sqrt_rn
from hf_lowprec.rounding.block_floats import block_max
from hf_lowprec.rounding.random_bits import weyl

COMPARISONS: dict[Any, str] = {
    operator.gt: ">",
    operator.ge: ">=",
    operator.lt: "<",
    operator.le: "<=",
    operator.eq: "==",
    operator.ne: "!=",
}
_INFIX: dict[Any, str] = {
    **COMPARISONS,
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
}
_TO_FLOAT = {sqrt_rn, quiet_nan, operator.truediv}
_TO_INTEGER = {*COMPARISONS, operator.rshift, torch.clamp_min, torch.clamp_max, weyl, block_max}
"""Functions whose result has the same type for all operands."""
FLOAT_BITS, INTEGER_BITS = "view as float", "view as integer"
"""The operations `Tensor.view(dtype)`: the same 32 bits, as a float or as an integer."""

Write = Callable[..., str]
"""Writes an operation, from the source text of its operands."""


@dataclass(frozen=True)
class Language:
    """How a language writes the operations on FP32 and 32-bit integer scalars.

    Integers wrap around; right shifts and comparisons of integers are signed. Floats follow IEEE 754, with correctly
    rounded quotients and square roots.

    Attributes:
        assign: writes a statement that assigns an expression to a new variable, from the variable's name, the
            expression, and whether it is a float.
        number: writes a literal, from its value and whether it is a float.
        operations: writes an operation, by the traced function; others are written as in Python.
        of_floats: the same for operations on floats only.
        of_integers: the same for operations on integers only.
    """

    assign: Callable[[str, str, bool], str]
    number: Callable[[float, bool], str]
    operations: Mapping[Any, Write]
    of_floats: Mapping[Any, Write] = field(default_factory=dict)
    of_integers: Mapping[Any, Write] = field(default_factory=dict)

    def write(self, operation: Any, operands: Sequence[str], floats: bool) -> str | None:
        """Return the source text of an operation on floats or integers; None if the language has none."""
        for table in (self.of_floats if floats else self.of_integers, self.operations):
            if operation in table:
                return table[operation](*operands)
        return f" {_INFIX[operation]} ".join(operands) if operation in _INFIX else None


class Operation(NamedTuple):
    """A rendered operation: its expression, and whether the result is a float."""

    expression: str
    is_float: bool


def statements(graph: fx.Graph, language: Language, integers: Collection[str]) -> tuple[list[str], list[str]]:
    """Render every operation of `graph`.

    Args:
        graph: from `trace.py`.
        language: the language.
        integers: names of the inputs that are integers; all other inputs are floats.

    Returns:
        The statements, and the names of the variables that hold the graph's outputs.

    Raises:
        NotImplementedError: an operation has no rendering.
    """
    rendered = operations(graph, language, integers)
    lines = [language.assign(node.name, *operation) for node, operation in rendered.items()]
    return lines, [result.name for result in output_nodes(graph)]


def operations(graph: fx.Graph, language: Language, integers: Collection[str]) -> dict[fx.Node, Operation]:
    """Render every operation of `graph`, in order. Arguments and errors are those of `statements`."""
    rendered: dict[fx.Node, Operation] = {}
    is_float: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_float[node] = node.name not in integers
        elif node.op != "output":
            rendered[node] = Operation(*_expression(node, is_float, language))
            is_float[node] = rendered[node].is_float
    return rendered


def output_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes of the graph's outputs, in order."""
    (outputs,) = graph.output_node().args
    return cast(tuple[fx.Node, ...], outputs)


def _expression(node: fx.Node, is_float: dict[fx.Node, bool], language: Language) -> tuple[str, bool]:
    """Render the operation of one node; also return whether its result is a float.

    Args:
        node: the operation.
        is_float: whether the result is a float, for each earlier node.
        language: the language.
    """

    args, target = node.args, node.target
    floats = any(is_float[arg] if isinstance(arg, fx.Node) else isinstance(arg, float) for arg in args)
    operands = [
        arg.name if isinstance(arg, fx.Node) else language.number(arg, floats)
        for arg in args
        if isinstance(arg, fx.Node | int | float)
    ]
    to_float = target in _TO_FLOAT or (floats and target not in _TO_INTEGER)
    if target == "view":
        to_float = args[1] is torch.float32
        target = FLOAT_BITS if to_float else INTEGER_BITS
    expression = language.write(target, operands, floats)
    if expression is None:
        raise NotImplementedError(f"{node.format_node()} has no rendering; add it to {__name__}")
    return expression, to_float


def description(spec: KernelSpec) -> list[str]:
    """Describe what a kernel of `spec` computes, in lines for the comment at the top of its source."""
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
    """Indent and join `lines` of source code."""
    return "\n".join(" " * spaces + line for line in lines)


def arguments(names: Iterable[str], spaces: int) -> str:
    """Join and wrap parameters or arguments; continuation lines are indented by `spaces`."""
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
