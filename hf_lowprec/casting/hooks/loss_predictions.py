"""The layers whose outputs a module's `forward` passes to torch's losses, and to no code that needs equal dtypes.

FP32 copies of their outputs make the loss FP32. Elsewhere a copy would meet a 16-bit tensor: torch promotes in
elementwise operations, but raises an error in products, and in layers. `forward_flow.py` follows the outputs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from hf_lowprec.casting.hooks.forward_flow import INHERITED_FORWARD, ForwardFlow
from hf_lowprec.casting.hooks.source_evaluation import NotUnderstood

__all__ = ["INHERITED_FORWARD", "loss_predictions", "loss_weights", "multiplies_with_16_bits"]


def loss_predictions(
    module: nn.Module,
    mixes_dtypes: bool,
    dtype_of: Callable[[Tensor], torch.dtype] = lambda tensor: tensor.dtype,
) -> list[str]:
    """The layers below a module whose outputs can be upcast, so that torch's losses in its `forward` are FP32.

    Args:
        module: a module with a `forward` in Python.
        mixes_dtypes: whether torch differentiates losses between tensors of different dtypes.
        dtype_of: the dtype that a parameter or buffer of the module has, or is going to have.

    Returns:
        Their qualified names below `module`, or `INHERITED_FORWARD`; empty if the source of `forward` is not available.
    """
    flow = _evaluate(module, mixes_dtypes, dtype_of)
    return [] if flow is None else sorted(flow.reached - flow.fp32_layers)


def loss_weights(
    module: nn.Module,
    mixes_dtypes: bool,
    dtype_of: Callable[[Tensor], torch.dtype],
    fp32_layers: Collection[str],
) -> list[str]:
    """The parameters and buffers that weigh classes in torch's losses of FP32 predictions.

    torch takes no 16-bit weights for those.

    Args:
        module: as in `loss_predictions`.
        mixes_dtypes: as in `loss_predictions`.
        dtype_of: as in `loss_predictions`.
        fp32_layers: qualified names of the layers that return FP32 anyway.

    Returns:
        Qualified names below `module`.
    """
    flow = _evaluate(module, mixes_dtypes, dtype_of, frozenset(fp32_layers), keeps_weights=True)
    return [] if flow is None else sorted(flow.weights - flow.bound_tensors)


def multiplies_with_16_bits(module: nn.Module, path: str) -> bool:
    """Return whether a module's `forward` multiplies FP32 outputs of a module inside it with 16-bit tensors.

    False if its source cannot be read or is not understood.

    Args:
        module: a module that is cast.
        path: the qualified name of the inner module below `module`. The modules around it may hand its outputs on.
    """
    function = _forward_source(module)
    if function is None:
        return False
    names = path.split(".")
    inner = frozenset(".".join(names[:depth]) for depth in range(1, len(names) + 1))
    flow = ForwardFlow(module, True, lambda tensor: tensor.dtype, frozenset(), inner, keeps_weights=False)
    try:
        flow.run(function)
    except (NotUnderstood, RecursionError):
        return False
    return not flow.in_products.isdisjoint(inner)


def _evaluate(
    module: nn.Module,
    mixes_dtypes: bool,
    dtype_of: Callable[[Tensor], torch.dtype],
    fp32_layers: frozenset[str] = frozenset(),
    keeps_weights: bool = False,
) -> ForwardFlow | None:
    """The last evaluation, in which no copy meets what needs equal dtypes. None if the code is not understood."""
    function = _forward_source(module)
    excluded = set[str]()
    while function is not None:
        flow = ForwardFlow(module, mixes_dtypes, dtype_of, frozenset(excluded), fp32_layers, keeps_weights)
        try:
            flow.run(function)
        except (NotUnderstood, RecursionError):
            return None
        # What reaches no loss is not upcast: the rest must do without it.
        rejected = flow.excluded | (flow.layers - flow.reached)
        if rejected <= excluded:
            return flow
        excluded |= rejected
    return None


def _forward_source(module: nn.Module) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        statement = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(statement, ast.FunctionDef) or not (statement.args.posonlyargs or statement.args.args):
        return None
    return statement
