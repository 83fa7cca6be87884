"""Torch's loss functions compute in FP32 while a user's `forward` runs, as they do under autocast.

Their 16-bit arguments are replaced by exact FP32 copies. Everything else in the `forward` stays as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_lowprec.casting.hooks.forward_code import TORCH_LOSS_FUNCTIONS
from hf_lowprec.casting.hooks.module_hooks import to_fp32_copies
from hf_lowprec.casting.private_torch_apis import runs_in_checkpoint, show_cross_entropy_to_modes
from hf_lowprec.wrapped_method import unwrap_method, wrap_once

# `nll_loss`, `kl_div` and `ctc_loss` are given logarithms: rounded ones would make rounded losses.
_IN_FP32 = {functional.log_softmax, torch.log_softmax, Tensor.log_softmax}
_IN_FP32 |= {getattr(functional, name) for name in TORCH_LOSS_FUNCTIONS}
_IN_FP32.add(torch.cdist)  # takes no 16-bit numbers


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
