"""Accumulate the gradients of micro-batches without losing what each addition rounds off.

torch accumulates into `p.grad` in the parameter's dtype and rounds at each micro-batch, which loses accuracy just as a
BF16 sum over ranks does. A hook on each parameter keeps the rounding error. `p.grad` is the rounded sum at all times,
so clipping, DDP and the optimizer find what they expect.
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

GradAccumulation = Literal["nearest", "kahan", "fp32"]
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


def accumulator_bytes(params: Iterable[Tensor], mode: str) -> int:
    """Bytes that `mode` will hold in addition to the gradients of `params`."""
    return sum(p.numel() * _remainder_dtype(p, mode).itemsize for p in params if _is_accumulated(p, mode))


def _is_accumulated(param: Tensor, mode: str) -> bool:
    """Return whether the gradients of `param` are accumulated here instead of by torch."""
    dtypes = {"nearest": (), "kahan": LOW_PRECISION_DTYPES, "fp32": (*LOW_PRECISION_DTYPES, torch.float32)}[mode]
    return param.requires_grad and param.dtype in dtypes


def _remainder_dtype(gradient: Tensor, mode: str) -> torch.dtype:
    """The dtype of a `_Remainder`: the gradient's for a residual, a wider one for a whole sum."""
    if mode == "kahan":
        return gradient.dtype
    return torch.float32 if gradient.dtype in LOW_PRECISION_DTYPES else torch.float64


@dataclass
class _Remainder:
    """The part of a sum that is kept in addition to `p.grad`.

    Attributes:
        value: with `"fp32"` the whole sum in a wider dtype, with `"kahan"` the sum's residual: exact sum − `p.grad`.
        grad_version: version of `p.grad` after the last addition. If it differs later, other code wrote to `p.grad`.
    """

    value: Tensor
    grad_version: int


class GradientAccumulator:
    """Accumulates the gradients of a step's micro-batches, in FP32 or in 16 bits with a 16-bit residual.

    A new sum begins when `p.grad` is None or was modified by other code (`zero_grad(set_to_none=False)`, clipping). If
    gradients are views of a bucket (`gradient_as_bucket_view=True`) and there is only one rank, such modifications are
    not noticed; set gradients to None instead, as `zero_grad` does by default.

    Args:
        model: its trainable parameters get hooks, which replace those of an earlier accumulator. Call
            `watch_parameters` after parameters were unfrozen or replaced.
        mode: `"fp32"`, which sums gradients of FP32 parameters (norms) in FP64, as the reduction over ranks does; or
            `"kahan"`, which leaves FP32 parameters to torch.
    """

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.__setstate__({"model": model, "mode": mode})

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the sums, because torch pickles parameters without gradients and hooks."""
        return {"model": self._model(), "mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model, self.mode = state["model"], state["mode"]
        if model is None:  # it had been deleted before pickling
            model = nn.Module()
        self._model = weakref.ref(model)
        if model in _accumulators:
            _accumulators[model].remove()
        _accumulators[model] = self
        self._remainders: dict[nn.Parameter, _Remainder] = {}
        self._handles: Any = WeakIdKeyDictionary()  # the hook of each parameter that has one
        self.watch_parameters()

    def watch_parameters(self) -> None:
        """Give hooks to parameters that have become trainable, and discard the sums of those that were replaced.

        Sums are complete if this is called before the first backward pass that gives such a parameter a gradient.
        """
        model = self._model()
        params = [] if model is None else list(model.parameters())
        for param in params:
            if param not in self._handles and _is_accumulated(param, self.mode):
                self._handles[param] = param.register_hook(self._make_hook(param))
        for replaced in self._remainders.keys() - set(params):
            del self._remainders[replaced]

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the gradients."""
        return sum(remainder.value.nbytes for remainder in self._remainders.values())

    def restart(self) -> None:
        """Begin a new sum. Call it when `p.grad` is final, for example after the reduction over ranks."""
        self._remainders.clear()

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
            self._remainders.pop(param, None)
            return gradient
        remainder = self._remainders.get(param)
        # Views of a bucket share the version of the whole bucket.
        if remainder is None or (not is_view(total) and remainder.grad_version != version_of(total)):
            dtype = _remainder_dtype(total, self.mode)
            value = total.to(dtype) if self.mode == "fp32" else torch.zeros_like(total, dtype=dtype)
            remainder = self._remainders[param] = _Remainder(value, 0)
        if self.mode == "fp32":
            remainder.value += gradient
            total.copy_(remainder.value)
        else:
            exact = remainder.value.float().add_(gradient).add_(total)
            total.copy_(exact)
            residual = exact.sub_(total)
            remainder.value.copy_(torch.where(residual.isfinite(), residual, 0))
        remainder.grad_version = version_of(total) + 1
        # Autograd adds minus zero, which changes nothing, not even the sign of a zero.
        return gradient.new_full((), -0.0).expand_as(gradient)


_accumulators: weakref.WeakKeyDictionary[nn.Module, GradientAccumulator] = weakref.WeakKeyDictionary()
"""The accumulator of each model that has one."""
