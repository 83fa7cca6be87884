"""Accumulate the gradients of micro-batches in FP32.

torch accumulates into `p.grad` in the parameter's dtype and rounds at each micro-batch, which loses accuracy just as a
BF16 sum over ranks does. A hook on each parameter adds to an FP32 sum instead. `p.grad` is the rounded sum at all
times, so clipping, DDP and the optimizer find what they expect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_lowprec.reduction.private_torch_apis import is_view, version_of
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
    """Bytes that a `GradientAccumulator` will hold in addition to the gradients of `params`."""
    return sum(p.numel() * _sum_dtype(p).itemsize for p in params if _is_accumulated(p))


def _is_accumulated(param: Tensor) -> bool:
    """Return whether the gradients of `param` are accumulated here instead of by torch."""
    return param.requires_grad and param.dtype in (*LOW_PRECISION_DTYPES, torch.float32)


def _sum_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float32 if gradient.dtype in LOW_PRECISION_DTYPES else torch.float64


@dataclass
class _Sum:
    """A sum in a wider dtype than `p.grad`, which is the rounded one.

    Attributes:
        value: the sum.
        grad_version: version of `p.grad` after the last addition. If it differs later, other code wrote to `p.grad`.
    """

    value: Tensor
    grad_version: int


class GradientAccumulator:
    """Accumulates the gradients of a step's micro-batches in FP32; those of FP32 parameters (norms) in FP64, as the
    reduction over ranks does.

    A new sum begins when `p.grad` is None or was modified by other code (`zero_grad(set_to_none=False)`, clipping). If
    gradients are views of a bucket (`gradient_as_bucket_view=True`) and there is only one rank, such modifications are
    not noticed; set gradients to None instead, as `zero_grad` does by default.

    Args:
        model: its trainable parameters get hooks, which replace those of an earlier accumulator. Call
            `watch_parameters` after parameters were unfrozen or replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.__setstate__({"model": model})

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the sums, because torch pickles parameters without gradients and hooks."""
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["model"]
        if model is None:  # it had been deleted before pickling
            model = nn.Module()
        self._model = weakref.ref(model)
        if model in _accumulators:
            _accumulators[model].remove()
        _accumulators[model] = self
        self._sums: dict[nn.Parameter, _Sum] = {}
        self._handles: Any = WeakIdKeyDictionary()  # the hook of each parameter that has one
        self.watch_parameters()

    def watch_parameters(self) -> None:
        """Give hooks to parameters that have become trainable, and discard the sums of those that were replaced.

        Sums are complete if this is called before the first backward pass that gives such a parameter a gradient.
        """
        model = self._model()
        params = [] if model is None else list(model.parameters())
        for param in params:
            if param not in self._handles and _is_accumulated(param):
                self._handles[param] = param.register_hook(self._make_hook(param))
        for replaced in self._sums.keys() - set(params):
            del self._sums[replaced]

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the gradients."""
        return sum(each.value.nbytes for each in self._sums.values())

    def restart(self) -> None:
        """Begin a new sum. Call it when `p.grad` is final, for example after the reduction over ranks."""
        self._sums.clear()

    def remove(self) -> None:
        """Remove the hooks and discard the sums, so that torch accumulates again."""
        for handle in self._handles.values():
            handle.remove()
        self.restart()

    def _make_hook(self, param: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def accumulate(gradient: Tensor) -> Tensor:
            with torch.no_grad():
                return self._accumulate(param, gradient)

        return accumulate

    def _accumulate(self, param: nn.Parameter, gradient: Tensor) -> Tensor:
        """Add a micro-batch's gradient to `p.grad`, and return what autograd must still add: the gradient or nothing.

        The first gradient of a sum is left to autograd, which makes it `p.grad`.
        """
        total = param.grad
        if total is None:
            self._sums.pop(param, None)
            return gradient
        exact = self._sums.get(param)
        # Views of a bucket share the version of the whole bucket.
        if exact is None or (not is_view(total) and exact.grad_version != version_of(total)):
            exact = self._sums[param] = _Sum(total.to(_sum_dtype(total)), 0)
        exact.value += gradient
        total.copy_(exact.value)
        exact.grad_version = version_of(total) + 1
        # Autograd adds minus zero, which changes nothing, not even the sign of a zero.
        return gradient.new_full((), -0.0).expand_as(gradient)


_accumulators: weakref.WeakKeyDictionary[nn.Module, GradientAccumulator] = weakref.WeakKeyDictionary()
"""The accumulator of each model that has one."""
