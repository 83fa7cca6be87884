"""Rewrite a traced graph for NVIDIA GPUs: fewer instructions, the same bits.

- **NaN is tested once.** A rounding replaces NaN by the one without a payload before it adds to the bit pattern, which
  takes two instructions for each stored tensor. But a NaN is rare, and passes from operand to result: if a moment is
  NaN, so are the weight and its compensation. So it is enough to test the last ones, and to look at the others only if
  one of them is NaN.
- **BF16 is rounded to by a conversion**, where the mode rounds to nearest.
- **BF16 is converted to FP32 where it is first used**, so that it takes half the registers until then.
- **A denominator that is a root plus ε is not tested**: it is enough that ε is not too small.
- **Random bits are made for two elements at once**, in the halves of a register, and added from there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_lowprec.optim.backends.trace import trace
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import quiet_nan, round_nearest, sqrt_rn
from hf_lowprec.rounding.nearest import nearest_pattern
from hf_lowprec.rounding.random_bits import lane, lane_bits


def from_bfloat16(pattern: Tensor) -> Tensor:
    """The FP32 values of the bit patterns of BF16 numbers. Only a renderer can run this."""
    raise NotImplementedError


def to_bfloat16(value: Tensor) -> Tensor:
    """Round FP32 to the nearest BF16 number, ties to even. The result is FP32; NaN becomes any NaN."""
    if has_torch_function_unary(value):
        return handle_torch_function(to_bfloat16, (value,), value)
    return nearest_pattern(value, torch.bfloat16)


def _nearest_by_conversion(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Stand in for `round_nearest` while the graph is recorded."""
    return quiet_nan(to_bfloat16(value)) if dtype == torch.bfloat16 else nearest_pattern(value, dtype)


def add_lane(pattern: Tensor, word: Tensor, role: int) -> Tensor:
    """Add the random bits of a role, which must be mixed from both halves of the word (`role % 3` is not 0)."""
    return pattern + lane(word, role)


def divide_above(numerator: Tensor, denominator: Tensor, floor: Tensor) -> Tensor:
    """A quotient whose denominators are all NaN or at least `floor`, which is a scalar."""
    return numerator / denominator


def quiet_nans(values: tuple[Tensor, ...], tested: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Replace NaN by the one without a payload, see `quiet_nan`.

    Args:
        values: FP32 tensors of one shape.
        tested: indices of those tensors of which one is NaN wherever any tensor is.

    Only a renderer can run this.
    """
    raise NotImplementedError


_PASSES_NAN: set[Callable] = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.neg,
    operator.truediv,
    sqrt_rn,
    to_bfloat16,
}
"""Operations whose result is NaN if an operand is."""


def trace_for_ptx(spec: KernelSpec) -> fx.Graph:
    """The graph of `trace`, except that tensors in BF16 are inputs as bit patterns."""
    graph = trace(spec, {round_nearest: _nearest_by_conversion})
    return convert_on_use(_add_lanes(_bound_denominators(_join_nan_tests(graph))), spec)


def convert_on_use(graph: fx.Graph, spec: KernelSpec) -> fx.Graph:
    """Make the tensors that `spec` stores in BF16 inputs as bit patterns; modifies and returns `graph`."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and spec.tensors.get(node.name) == torch.bfloat16 and node.users:
            with graph.inserting_before(next(user for user in graph.nodes if user in node.users)):
                value = graph.call_function(from_bfloat16, (node,))
            node.replace_all_uses_with(value, lambda user, value=value: user is not value)
    return graph


def _bound_denominators(graph: fx.Graph) -> fx.Graph:
    """Make divisions by `√x + ε` or `√x · c + ε`, with scalars c and ε, a `divide_above`; modifies `graph`."""
    for node in list(graph.nodes):
        if node.target is operator.truediv and (scalars := _root_plus(node.args[1])) is not None:
            factor, floor = scalars
            with graph.inserting_before(node):
                if factor is not None:  # a root is not negative, but the factor could be
                    floor = graph.call_function(
                        torch.where, (graph.call_function(operator.ge, (factor, 0.0)), floor, 0.0)
                    )
                quotient = graph.call_function(divide_above, (*node.args, floor))
            node.replace_all_uses_with(quotient)
            graph.erase_node(node)
    return graph


def _root_plus(value: Any) -> tuple[fx.Node | None, fx.Node] | None:
    """The scalars c (None if there is none) and ε if `value` is `√x · c + ε` or `√x + ε`."""
    match _operands(value, operator.add):
        case (root, epsilon) if _is_scalar(epsilon) and _operands(root, sqrt_rn):
            return None, epsilon
        case (product, epsilon) if _is_scalar(epsilon):
            match _operands(product, operator.mul):
                case (root, factor) if _is_scalar(factor) and _operands(root, sqrt_rn):
                    return factor, epsilon
    return None


def _operands(value: Any, target: Callable) -> tuple[Any, ...]:
    """The operands of `value` if it is a result of `target`."""
    return value.args if isinstance(value, fx.Node) and value.target is target else ()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith("scalar_")


def _add_lanes(graph: fx.Graph) -> fx.Graph:
    """Replace each sum with a `lane` by `add_lane`, and other uses of it by its operations; changes `graph`.

    The lane of a role that is a multiple of 3 is a shift, which needs no PTX.
    """
    for node in list(graph.nodes):
        if node.target is not lane:
            continue
        word, role = node.args
        for user in list(node.users):
            if user.target is operator.add and role % 3 != 0:
                (pattern,) = (operand for operand in user.args if operand is not node)
                with graph.inserting_before(user):
                    total = graph.call_function(add_lane, (pattern, word, role))
                user.replace_all_uses_with(total)
                graph.erase_node(user)
        if node.users:
            with graph.inserting_before(node):
                recorded = cast(Tensor, fx.Proxy(word, fx.proxy.GraphAppendingTracer(graph)))
                bits = cast(fx.Proxy, lane_bits(recorded, role))
            node.replace_all_uses_with(bits.node)
        graph.erase_node(node)
    return graph


def _join_nan_tests(graph: fx.Graph) -> fx.Graph:
    """A graph of the same operations, in which `quiet_nans` stands for as many `quiet_nan` as possible."""
    for node in graph.nodes:
        if node.target is quiet_nan:
            # Arithmetic gives the same NaN, whatever the payload of its operand.
            node.replace_all_uses_with(node.args[0], lambda user: user.target in _PASSES_NAN)
    graph.eliminate_dead_code()

    # A stage is what must be known before NaNs are tested together, and what depends on this.
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = [stages[needed] + (needed.target is quiet_nan) for needed in node.all_input_nodes]
        stages[node] = max(before, default=0)

    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for stage in range(max(stages.values()) + 1):
        nodes = [node for node in graph.nodes if stages[node] == stage and node.op != "output"]
        for node in nodes:
            if node.target is not quiet_nan:
                copies[node] = result.node_copy(node, copies.__getitem__)
        quieted = [node for node in nodes if node.target is quiet_nan]
        values = [node.all_input_nodes[0] for node in quieted]
        if values:
            tested = tuple(k for k, value in enumerate(values) if not _passes_nan_to(value, values))
            together = result.call_function(quiet_nans, (tuple(copies[value] for value in values), tested))
            for k, node in enumerate(quieted):
                copies[node] = result.call_function(operator.getitem, (together, k))
    result.node_copy(graph.output_node(), copies.__getitem__)
    return result


def _passes_nan_to(value: fx.Node, others: list[fx.Node]) -> bool:
    """True if a NaN in `value` always makes one of the other nodes NaN."""
    first = value.all_input_nodes[0] if value.target is to_bfloat16 else value  # both are NaN, or none
    reached, remaining = {first}, [first]
    while remaining:
        for user in remaining.pop().users:
            if user.target in _PASSES_NAN and user not in reached:
                reached.add(user)
                remaining.append(user)
    return any(other in reached for other in others if other is not value)
