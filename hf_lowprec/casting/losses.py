"""Losses on FP32 copies of 16-bit predictions: the copies are exact, so only the loss itself is no longer rounded."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_lowprec.casting.boundaries import enter_float32

_OWN = "_loss_function"
"""Where transformers' property keeps a model's own function."""
TORCH_LOSSES = {*nn.modules.loss.__all__, *(n for n in dir(nn.functional) if n.endswith(("_loss", "cross_entropy")))}
"""Names of torch's loss modules and functions."""


@dataclass(frozen=True)
class FloatLoss:
    """A loss function that gets its floating arguments in FP32, at any depth of tuples, lists and dicts.

    What matches predictions with labels needs it, not only accuracy: `torch.cdist` takes no 16-bit numbers, and
    labels are FP32.
    """

    function: Callable[..., Any]
    own: bool  # whether it was the model's own, not the one that its class chooses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter_float32(None, args, kwargs)
        return self.function(*args, **kwargs)


def widen_loss(module: nn.Module) -> bool | None:
    """Let a model's `loss_function`, as transformers has it, compute in FP32; whether it did not, None without one.

    None also for a model that computes its loss in `forward` by itself: that stays as it is.
    """
    # Only where the class has it (PEFT's wrappers forward attributes) and a loss belongs to it (not to a part).
    chosen = getattr(type(module), "loss_function", None)
    if not isinstance(chosen, property) or chosen.fset is None:
        return None
    if getattr(module, "loss_type", None) is None and _OWN not in vars(module):
        return None
    model: Any = module
    if not isinstance(model.loss_function, FloatLoss):
        # Through the property: nn.Module's own way fails where a module was assigned, which the property ignores.
        chosen.fset(module, FloatLoss(model.loss_function, _OWN in vars(module)))
        return True if _calls_it(module) else None
    return False if _calls_it(module) else None


def narrow_loss(module: nn.Module) -> None:
    """Take `widen_loss` back."""
    loss = vars(module).get(_OWN)
    if isinstance(loss, FloatLoss) and loss.own:
        setattr(module, _OWN, loss.function)
    elif isinstance(loss, FloatLoss):
        delattr(module, _OWN)


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """The global names and attributes that the code of a module's `forward` uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's `forward`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def uses_torch_losses(module: nn.Module) -> bool:
    """Whether a module's `forward` uses one of torch's losses."""
    return not TORCH_LOSSES.isdisjoint(names_in_forward(module))


def _calls_it(module: nn.Module) -> bool:
    return "loss_function" in names_in_forward(module)
