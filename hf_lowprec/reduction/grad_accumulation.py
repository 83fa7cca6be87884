"""Accumulate the gradients of micro-batches in FP32.

torch accumulates into `p.grad` in the parameter's dtype and rounds at each micro-batch, which loses accuracy just as a
BF16 sum over ranks does. Here, a hook adds to an FP32 sum instead. `p.grad` is always the rounded sum, so clipping, DDP
and the optimizer find what they expect.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

GradAccumulation = Literal["nearest", "fp32"]
"""Values of the option `grad_accumulation`; `"nearest"` is torch's own accumulation."""


def check_grad_accumulation(grad_accumulation: str) -> GradAccumulation:
    """Return `grad_accumulation` if it is a `GradAccumulation`.

    Raises:
        ValueError: it is not.
    """
    if grad_accumulation not in get_args(GradAccumulation):
        modes = ", ".join(map(repr, get_args(GradAccumulation)))
        raise ValueError(f"grad_accumulation={grad_accumulation!r} is unknown; valid are {modes}")
    return cast(GradAccumulation, grad_accumulation)


def accumulator_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes that a `GradientAccumulator` will hold in addition to the gradients of `params`."""
    return sum(p.numel() * _sum_dtype(p).itemsize for p in params if _is_accumulated(p))


def _is_accumulated(param: Tensor) -> bool:
    """Return whether the gradients of `param` are accumulated here instead of by torch."""
    return param.requires_grad and param.dtype in (*LOW_PRECISION_DTYPES, torch.float32)


def _sum_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in LOW_PRECISION_DTYPES else torch.float64


@dataclass
class _Sum:
    """A sum in a wider dtype than `p.grad`, which is the rounded sum.

    Attributes:
        value: the sum.
        grad: refers to `p.grad` after the last addition.
        grad_version: its version then. If the tensor or the version differs later, other code has changed the gradient.
    """

    value: Tensor
    grad: TensorWeakRef
    grad_version: int


class GradientAccumulator:
    """Accumulates the gradients of a step's micro-batches in FP32, or in FP64 for FP32 parameters (norms).

    The reduction over ranks does the same. It acts only in backward passes inside `with accumulator.active():`, and
    neither in `torch.autograd.grad` nor where the graph of the gradients is kept (`create_graph=True`).

    A new sum begins when `p.grad` is None, was replaced, or was modified by other code (`zero_grad(set_to_none=False)`,
    clipping). If gradients are views of a bucket (`gradient_as_bucket_view=True`) and there is only one rank, changes
    in place are not noticed; set gradients to None instead, as `zero_grad` does by default.

    Args:
        model: the model; parameters that are trainable when a backward pass begins are included.

    Attributes:
        was_active: whether a backward pass has been accumulated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.__setstate__({"model": model})

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the sums, because torch pickles parameters without gradients."""
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["model"]
        if model is None:  # it had been deleted before pickling
            model = nn.Module()
        self._model = weakref.ref(model)
        self._sums: Any = WeakIdKeyDictionary()  # the `_Sum` of each parameter that has one
        self.was_active = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside."""
        self.was_active = True
        model = self._model()
        params = [] if model is None else [param for param in model.parameters() if _is_accumulated(param)]
        with torch.enable_grad():
            views: list[Any] = [param.view_as(param) for param in params]
        # Autograd adds to `p.grad` in these nodes, which only a graph and this list keep alive.
        nodes = [view.grad_fn.next_functions[0][0] for view in views]
        hooks = [
            node.register_prehook(functools.partial(self._accumulate, param))
            for node, param in zip(nodes, params, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the gradients."""
        return sum(exact.value.nbytes for exact in self._sums.values())

    def restart(self) -> None:
        """Begin new sums. Call it when `p.grad` is final, for example after the reduction over ranks."""
        self._sums.clear()

    def _accumulate(self, param: nn.Parameter, gradients: tuple[Tensor | None]) -> tuple[Tensor] | None:
        """Add a micro-batch's gradient to `p.grad`, and return minus zeros, so that autograd adds nothing.

        If it returns None, autograd adds the gradient, and makes the first one of a sum `p.grad`.
        """
        (gradient,) = gradients
        if gradient is None:
            return None
        total = param.grad
        if total is None or torch.is_grad_enabled():  # enabled if the graph is kept
            self._sums.pop(param, None)
            return None
        exact = self._sums.get(param)
        # Views of a bucket share the version of the whole bucket.
        unchanged = exact is not None and (
            total._is_view() or (exact.grad() is total and exact.grad_version == total._version)
        )
        if not unchanged:
            exact = self._sums[param] = _Sum(total.to(_sum_dtype(total)), TensorWeakRef(total), 0)
        exact.value += gradient
        total.copy_(exact.value)
        exact.grad_version = total._version + 1
        # Autograd adds minus zero, which changes nothing, not even the sign of a zero.
        return (gradient.new_full((), -0.0).expand_as(gradient),)
