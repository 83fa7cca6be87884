"""Break functions of torch on purpose: wrong in BF16, as a library's kernel can be for a few shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

Distort = Callable[[Tensor], Tensor]


def off_by(share: float, index: Any = ...) -> Distort:
    """Moves the values at `index` by a share of themselves, each its neighbour's: as large an error, but no factor."""

    def distort(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        part = tensor[index]
        tensor[index] = part + share * part.flatten().roll(1).view_as(part)
        return tensor

    return distort


def fill(value: float, index: Any = ...) -> Distort:
    """Writes a value at `index`."""

    def distort(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return distort


class _Gradient(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, distort: Distort) -> Tensor:
        ctx.distort = distort
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.distort(gradient), None


def break_function(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    distort: Distort,
    where: str = "output",
    only: Callable[[list[Any]], bool] = lambda values: True,
) -> None:
    """Let `torch.nn.functional.<name>` be wrong in BF16.

    Args:
        monkeypatch: undoes it.
        name: of the function.
        distort: what becomes of the right values.
        where: `"output"`, or the gradient of the first (`"input"`), second (`"weight"`) or third argument (`"bias"`).
        only: which calls are wrong, by the values of their arguments.
    """
    right = getattr(F, name)

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        values = [*args, *kwargs.values()]
        if values[0].dtype != torch.bfloat16 or not only(values):
            return right(*args, **kwargs)
        if where == "output":
            return _distorted(right(*args, **kwargs), distort)
        place = ("input", "weight", "bias").index(where)
        values[place] = _Gradient.apply(values[place], distort)
        return right(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    monkeypatch.setattr(F, name, wrong)


def _distorted(tensor: Tensor, distort: Distort) -> Tensor:
    """Other values with the right ones' gradient."""
    return tensor + (distort(tensor.detach()) - tensor.detach())
