"""Gradients of micro-batches added up without rounding every time.

`p.grad` accumulates in the parameter's dtype, and rounds at each micro-batch: the same loss as in a sum over ranks,
one axis over. A hook on each parameter keeps what rounding leaves out; `p.grad` is the rounded sum at any time, so
clipping, DDP and the optimizer find what they expect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

MODES = ("nearest", "kahan", "fp32")


def check_mode(grad_accumulation: str) -> str:
    """`grad_accumulation`, if it is one of `MODES`; else raise ValueError."""
    if grad_accumulation not in MODES:
        raise ValueError(f"grad_accumulation={grad_accumulation!r} is none of {', '.join(map(repr, MODES))}")
    return grad_accumulation


def residual_bytes(params: Iterable[Tensor], mode: str) -> int:
    """Bytes that `mode` will hold in addition to the gradients of `params`."""
    return sum(p.numel() * _residual_dtype(p, mode).itemsize for p in params if _is_summed(p, mode))


def _is_summed(param: Tensor, mode: str) -> bool:
    summed = {"nearest": (), "kahan": LOW_PRECISION_DTYPES, "fp32": (*LOW_PRECISION_DTYPES, torch.float32)}[mode]
    return param.requires_grad and param.dtype in summed


def _residual_dtype(gradient: Tensor, mode: str) -> torch.dtype:
    """What is kept in addition to a gradient: the residual in its dtype, or the whole sum in a wider one."""
    if mode == "kahan":
        return gradient.dtype
    return torch.float32 if gradient.dtype in LOW_PRECISION_DTYPES else torch.float64


@dataclass
class _Sum:
    """What `p.grad` does not hold: the wide sum, or the residual in the gradient's dtype."""

    kept: Tensor
    version: int


class MicroBatches:
    """Sums of gradients over the micro-batches of a step, in FP32 or in 16 bits with a 16-bit residual.

    A sum begins when `p.grad` is None, and anew when `p.grad` was changed from outside (`zero_grad(set_to_none=False)`,
    clipping). Where gradients are views of a bucket (`gradient_as_bucket_view=True`) and there is one rank only, the
    latter is not seen; set them to None there, as `zero_grad` does by default.

    Args:
        model: its trainable parameters get hooks, in the place of those of an earlier instance.
        mode: `"fp32"`, which sums gradients of FP32 parameters (norms) in FP64, as the reduction over ranks does; or
            `"kahan"`, which leaves FP32 parameters alone.
    """

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.__setstate__({"model": model, "mode": mode})

    def __getstate__(self) -> dict[str, Any]:
        """Without sums: torch pickles parameters without gradients and hooks."""
        return {"model": self._model(), "mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model, self.mode = state["model"], state["mode"]
        if model is None:  # it was gone by the time of pickling
            model = nn.Module()
        self._model = weakref.ref(model)
        if model in _active:
            _active[model].remove()
        _active[model] = self
        self._sums: dict[nn.Parameter, _Sum] = {}
        self._handles = [
            param.register_hook(self._hook(param)) for param in model.parameters() if _is_summed(param, self.mode)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the gradients."""
        return sum(held.kept.nbytes for held in self._sums.values())

    def restart(self) -> None:
        """Begin a new sum: what is in `p.grad` is final."""
        self._sums.clear()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self.restart()

    def _hook(self, param: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def add(gradient: Tensor) -> Tensor:
            with torch.no_grad():
                return self._add(param, gradient)

        return add

    def _add(self, param: nn.Parameter, gradient: Tensor) -> Tensor:
        """Bring `p.grad` up to date, and return what autograd shall add to it."""
        total = param.grad
        if total is None:
            self._sums.pop(param, None)
            return gradient
        held = self._sums.get(param)
        # Views of a bucket share the version of the whole bucket.
        if held is None or (not total._is_view() and held.version != total._version):
            dtype = _residual_dtype(total, self.mode)
            kept = total.to(dtype) if self.mode == "fp32" else torch.zeros_like(total, dtype=dtype)
            held = self._sums[param] = _Sum(kept, 0)
        if self.mode == "fp32":
            held.kept += gradient
            total.copy_(held.kept)
        else:
            exact = held.kept.float().add_(gradient).add_(total)
            total.copy_(exact)
            left = exact.sub_(total)
            held.kept.copy_(torch.where(left.isfinite(), left, 0))
        held.version = total._version + 1
        # Autograd adds minus zero, which changes nothing; not even the sign of a zero.
        return gradient.new_full((), -0.0).expand_as(gradient)


_active: weakref.WeakKeyDictionary[nn.Module, MicroBatches] = weakref.WeakKeyDictionary()
