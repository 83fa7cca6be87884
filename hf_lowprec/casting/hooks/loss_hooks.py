"""The loss functions of models compute in FP32, on exact FP32 copies of 16-bit predictions.

Loss modules are kept in FP32 like norms (`fp32_rules/losses.py`). This file is about the `loss_function` that models of
transformers have, which is not a module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.hooks.module_hooks import upcast_inputs

_ASSIGNED = "_loss_function"
"""The attribute in which transformers' property keeps a function that was assigned to it."""


@dataclass(frozen=True)
class Fp32Loss:
    """A loss function that gets its floating arguments in FP32, at any depth of tuples, lists and dicts.

    Matching predictions with labels (DETR) needs this to run at all: `torch.cdist` takes no 16-bit numbers, and labels
    are FP32.
    """

    function: Callable[..., Any]
    was_assigned: bool  # to the model; otherwise the model's class had chosen it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = upcast_inputs(None, args, kwargs)
        return self.function(*args, **kwargs)


def has_loss_function(module: nn.Module) -> bool:
    """Return whether a module has a `loss_function` of its own, as transformers' property has it."""
    # Only where the class has it (PEFT's wrappers forward attributes) and a loss belongs to it (not to a part).
    chosen = getattr(type(module), "loss_function", None)
    if not isinstance(chosen, property) or chosen.fset is None:
        return False
    return getattr(module, "loss_type", None) is not None or _ASSIGNED in vars(module)


def calls_loss_function(module: nn.Module) -> bool:
    """Return whether a module's `forward` calls its `loss_function`, and does not compute a loss in its own code."""
    return "loss_function" in names_in_forward(module)


def install_fp32_loss(module: Any) -> bool:
    """Make the `loss_function` of a module, if it has one, compute in FP32. Return whether this is new."""
    if isinstance(module.loss_function, Fp32Loss):
        return False
    # Through the property: nn.Module's __setattr__ fails where a module was assigned, which the property ignores.
    loss = Fp32Loss(module.loss_function, _ASSIGNED in vars(module))
    type(module).loss_function.fset(module, loss)
    return True


def remove_fp32_loss(module: nn.Module) -> None:
    """Undo `install_fp32_loss`."""
    loss = vars(module).get(_ASSIGNED)
    if isinstance(loss, Fp32Loss) and loss.was_assigned:
        setattr(module, _ASSIGNED, loss.function)
    elif isinstance(loss, Fp32Loss):
        delattr(module, _ASSIGNED)
