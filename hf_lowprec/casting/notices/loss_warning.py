"""A warning, once per process, if a cast model trains with a loss that was computed in 16 bits.

Models of transformers that compute their loss in `forward` (BERT, T5) do so until `return_float32` is called. So does
the code of users that computes it by hand of 16-bit predictions, in `forward` or with what it takes out of the model.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting.hooks.module_hooks import remove_hooks, returns_float32
from hf_lowprec.once import first_time
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

_CALL = (
    "call hf_lowprec.return_float32(model) after cast_model(model) or, with Accelerate, "
    "prepare_accelerator(accelerator) before accelerator.prepare"
)
logger = logging.getLogger(__name__)


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
