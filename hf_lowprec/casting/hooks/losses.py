"""Losses that a model computes are FP32, on exact FP32 copies of 16-bit predictions; else there is a warning.

- The `loss_function` of models of transformers is not a module but a property. It chooses a function at each use, by
  `loss_type` or by assignment, so its getter is wrapped.
- Torch's loss functions compute in FP32 while a user's `forward` runs, as they do under autocast. Everything else in
  the `forward` stays as it is.
- Models of transformers that compute their loss in `forward` (BERT, T5) do it in 16 bits until `return_float32` is
  called. So does code of users that computes it by hand of 16-bit predictions. This causes a warning, once per process.

Loss modules are kept in FP32 like norms (`fp32_rules.py`).
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_lowprec.casting.hooks.forward_code import TORCH_LOSS_FUNCTIONS
from hf_lowprec.casting.hooks.module_hooks import remove_hooks, returns_float32, to_fp32_copies, upcast_inputs
from hf_lowprec.casting.private_torch_apis import runs_in_checkpoint, show_cross_entropy_to_modes
from hf_lowprec.once import first_time
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name
from hf_lowprec.wrapped_method import unwrap_method, wrap_once

_ASSIGNED = "_loss_function"
"""The attribute in which transformers' property keeps a function that was assigned to it."""
# `nll_loss`, `kl_div` and `ctc_loss` are given logarithms: rounded ones would make rounded losses.
_IN_FP32 = {functional.log_softmax, torch.log_softmax, Tensor.log_softmax}
_IN_FP32 |= {getattr(functional, name) for name in TORCH_LOSS_FUNCTIONS}
_IN_FP32.add(torch.cdist)  # takes no 16-bit numbers
_CALL = (
    "call hf_lowprec.return_float32(model) after cast_model(model) or, with Accelerate, "
    "prepare_accelerator(accelerator) before accelerator.prepare"
)
logger = logging.getLogger(__name__)


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
    return wrap_once(module, "loss_function", _returning_fp32_loss)


def remove_fp32_loss(module: nn.Module) -> None:
    """Undo `install_fp32_loss`."""
    unwrap_method(module, "loss_function", _returning_fp32_loss)


def _returning_fp32_loss(chosen: Callable[[Any], Callable[..., Any]], model: nn.Module) -> Callable[..., Any]:
    return functools.partial(fp32_loss, chosen(model))


class Fp32TorchLosses(TorchFunctionMode):
    """While it is active, torch's losses get exact FP32 copies of their 16-bit arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Activation checkpointing runs the code again in backward, without the mode, and compares dtypes.
        is_loss = func in _IN_FP32 or (func in (torch.logsumexp, Tensor.logsumexp) and not _keeps_dim(*args, **kwargs))
        if is_loss and not runs_in_checkpoint():
            args, kwargs = to_fp32_copies(args), to_fp32_copies(kwargs)
        return func(*args, **kwargs)


def _keeps_dim(input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> bool:
    """Return whether a `logsumexp` normalizes its input: as in attention, the result may be multiplied by 16 bits."""
    return keepdim


def install_fp32_torch_losses(module: nn.Module) -> bool:
    """Let torch's losses compute in FP32 in a module's `forward`. Return whether this is new."""
    show_cross_entropy_to_modes()
    return wrap_once(module, "forward", _with_fp32_losses)


def remove_fp32_torch_losses(module: nn.Module) -> None:
    """Undo `install_fp32_torch_losses`."""
    unwrap_method(module, "forward", _with_fp32_losses)


def _with_fp32_losses(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with Fp32TorchLosses():
        return forward(*args, **kwargs)


def install_loss_warning(module: nn.Module) -> bool:
    """Make `module` warn if it returns a 16-bit loss in training. Return whether this is new."""
    is_new = warn_of_16_bit_loss not in module._forward_hooks.values()
    for part in module.modules():
        remove_loss_warning(part)  # of an earlier cast of a part
    module.register_forward_hook(warn_of_16_bit_loss, prepend=True)  # before the loss is upcast
    return is_new


def remove_loss_warning(module: nn.Module) -> None:
    """Take `install_loss_warning` back."""
    remove_hooks(module, lambda hook: hook is warn_of_16_bit_loss)


def warn_of_16_bit_loss(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: log the warning if `output` has a loss in 16 bits that is to be differentiated."""
    if torch.compiler.is_compiling():
        return
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    way_out = _CALL if not returns_float32(module) else "use torch's loss functions there, or predictions.float()"
    warn_if_in_16_bits(loss[0] if isinstance(loss, tuple) else loss, type(module).__name__, way_out)


def warn_if_in_16_bits(loss: Any, computed_by: str, way_out: str) -> None:
    """Log the warning if `loss` is a 16-bit number that is to be differentiated."""
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    if is_loss and loss.dtype in LOW_PRECISION_DTYPES and first_time("loss in 16 bits"):
        text = "hf_lowprec: %s computes its loss in %s. For FP32, %s"
        logger.warning(text, computed_by, dtype_name(loss.dtype), way_out)
