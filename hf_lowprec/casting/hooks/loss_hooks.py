"""The loss functions of models compute in FP32, on exact FP32 copies of 16-bit predictions.

Loss modules are kept in FP32 like norms (`fp32_rules/losses.py`). This file is about the `loss_function` that models of
transformers have, which is not a module but a property. It chooses a function at each use, by `loss_type` or by
assignment, so its getter is wrapped.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_lowprec.casting.hooks.module_hooks import upcast_inputs
from hf_lowprec.wrapped_method import unwrap_method, wrap_once

_ASSIGNED = "_loss_function"
"""The attribute in which transformers' property keeps a function that was assigned to it."""


def fp32_loss(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a loss function with its floating arguments in FP32, at any depth of tuples, lists and dicts.

    Matching predictions with labels (DETR) needs this to run at all: `torch.cdist` takes no 16-bit numbers, and labels
    are FP32.
    """
    args, kwargs = upcast_inputs(None, args, kwargs)
    return function(*args, **kwargs)


def has_loss_function(module: nn.Module) -> bool:
    """Return whether a module has a `loss_function` of its own, as transformers' property has it."""
    # Only where the class has it (PEFT's wrappers forward attributes) and a loss belongs to it (not to a part).
    chosen = getattr(type(module), "loss_function", None)
    if not isinstance(chosen, property) or chosen.fset is None:
        return False
    return getattr(module, "loss_type", None) is not None or _ASSIGNED in vars(module)


def install_fp32_loss(module: nn.Module) -> bool:
    """Make the `loss_function` of a module, whichever it has later, compute in FP32. Return whether this is new."""
    return wrap_once(module, "loss_function", _in_fp32)


def remove_fp32_loss(module: nn.Module) -> None:
    """Undo `install_fp32_loss`."""
    unwrap_method(module, "loss_function", _in_fp32)


def _in_fp32(chosen: Callable[[Any], Callable[..., Any]], model: nn.Module) -> Callable[..., Any]:
    return functools.partial(fp32_loss, chosen(model))
