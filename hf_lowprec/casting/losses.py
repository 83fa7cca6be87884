"""Losses on FP32 copies of 16-bit predictions: the copies are exact, so only the loss itself is no longer rounded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_lowprec.casting.boundaries import enter_float32


@dataclass(frozen=True)
class FloatLoss:
    """A loss function that gets its floating arguments in FP32, at any depth of tuples, lists and dicts.

    What matches predictions with labels needs it, not only accuracy: `torch.cdist` takes no 16-bit numbers, and
    labels are FP32.
    """

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter_float32(None, args, kwargs)
        return self.function(*args, **kwargs)


def widen_loss(module: nn.Module) -> bool | None:
    """Let a model's `loss_function`, as transformers has it, compute in FP32; whether it did not, None without one."""
    # Only where the class has it (PEFT's wrappers forward attributes) and a loss belongs to it (not to a part).
    if not isinstance(getattr(type(module), "loss_function", None), property):
        return None
    if getattr(module, "loss_type", None) is None and "_loss_function" not in vars(module):
        return None
    model: Any = module
    if isinstance(model.loss_function, FloatLoss):
        return False
    model.loss_function = FloatLoss(model.loss_function)
    return True
