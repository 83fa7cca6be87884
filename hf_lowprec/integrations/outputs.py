"""What a Trainer's model hands to code that computes a loss from it: FP32, as under accelerate's mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_lowprec.casting.boundaries import converted
from hf_lowprec.casting.predictions import widen_predictions


def return_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Let calls of `model`, cast to `dtype`, return floating tensors in FP32 unless they return a loss; again changes
    nothing.

    A loss that is computed outside (`compute_loss`, label smoothing, rewards, contrastive losses) would otherwise be
    computed in 16 bits. Where there is a loss already, nothing is copied, but for the predictions of models that
    compute it in `forward` themselves. Caches stay as they are.
    """
    widen_predictions(model, dtype)
    if _widen_without_loss not in model._forward_hooks.values():
        model.register_forward_hook(_widen_without_loss)


def return_as_computed(model: nn.Module) -> None:
    """Take `return_float32` back."""
    for key, hook in list(model._forward_hooks.items()):
        if hook is _widen_without_loss:
            del model._forward_hooks[key]


def _widen_without_loss(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, dict) and output.get("loss") is not None:
        return output
    return converted(output, _float32)


def _float32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
