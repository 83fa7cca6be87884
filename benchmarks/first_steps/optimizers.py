"""The optimizers that are compared: FP32 AdamW, and ours with each initial compensation."""

from __future__ import annotations

import torch
from torch import nn

from hf_lowprec import AdamW, cast_model, return_float32

FP32 = "FP32"
OURS = {
    "zero": {"rounding": "kahan", "initial_compensation": "zero"},
    "low_bits": {"rounding": "kahan", "initial_compensation": "low_bits"},
    "dither": {"rounding": "kahan", "initial_compensation": "dither"},
    "stochastic": {"rounding": "stochastic"},
}
"""Name → keyword arguments of the optimizer. The first three are Kahan summation."""


def prepare(model: nn.Module, name: str, lr: float, seed: int, weight_decay: float = 0.01) -> torch.optim.Optimizer:
    """Cast an FP32 model, except for the optimizer `FP32`, and return the optimizer that trains it."""
    if name == FP32:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    cast_model(model, keep_low_bits=name == "low_bits")
    return_float32(model)
    return AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, seed=seed, **OURS[name])
