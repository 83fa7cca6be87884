"""The ways to train that are compared: dtypes of weights and states, and how they are rounded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hf_lowprec


@dataclass(frozen=True)
class Mode:
    """A way to train with AdamW.

    Attributes:
        label: for tables and plots.
        rounding: that of `hf_lowprec.AdamW`; None means torch's AdamW.
        weights: the dtype to which the whole model is converted, if the optimizer is torch's.
        autocast: whether forward and loss run under autocast to BF16.
        options: further arguments of `hf_lowprec.AdamW`.
    """

    label: str
    rounding: str | None = None
    weights: torch.dtype = torch.float32
    autocast: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def optimizer(self, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
        """Cast `model` in place, and build its optimizer.

        Args:
            model: in FP32.
            settings: `lr`, `betas`, `weight_decay`.
        """
        if self.rounding is None:
            model.to(self.weights)
            return torch.optim.AdamW(model.parameters(), fused=True, **settings)
        hf_lowprec.cast_model(model, keep_low_bits=self.rounding != "stochastic")
        return hf_lowprec.AdamW(model.parameters(), rounding=self.rounding, **settings, **self.options)

    def precision(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


INT8 = {"state_dtype": torch.int8}
MODES = {
    "fp32": Mode("FP32"),
    "autocast": Mode("FP32 weights, autocast", autocast=True),
    "nearest": Mode("BF16, rounded to nearest (torch)", weights=torch.bfloat16),
    "split": Mode("split", "split"),
    "split-int8": Mode("split, 8-bit states", "split", options=INT8),
    "kahan": Mode("Kahan", "kahan"),
    "sr": Mode("stochastic", "stochastic"),
    "sr-int8": Mode("stochastic, 8-bit states", "stochastic", options=INT8),
}
