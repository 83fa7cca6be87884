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
    """A way to train.

    Attributes:
        label: for tables and plots.
        rounding: that of this package's optimizer; None means torch's.
        weights: the dtype to which the whole model is converted, if the optimizer is torch's.
        autocast: whether forward and loss run under autocast to BF16.
        rounds_updates: whether FP32 weights are rounded to the nearest BF16 number after each step, and nothing else.
        masters: whether torch's AdamW steps FP32 copies of cast weights, see `MasterWeights`.
        options: further arguments of this package's optimizer.
    """

    label: str
    rounding: str | None = None
    weights: torch.dtype = torch.float32
    autocast: bool = False
    rounds_updates: bool = False
    masters: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def optimizer(self, model: nn.Module, algorithm: str = "AdamW", **settings: Any) -> torch.optim.Optimizer:
        """Cast `model` in place, and build its optimizer.

        Args:
            model: in FP32.
            algorithm: the name of a class of `torch.optim` and of this package.
            settings: its arguments.
        """
        if self.masters:
            masters = [param.detach().clone() for param in model.parameters()]
            hf_lowprec.cast_model(model, keep_low_bits=False)
            return MasterWeights(list(model.parameters()), masters, **settings)
        if self.rounding is None:
            model.to(self.weights)
            # torch 2.13's fused SGD leaves BF16 weights on a CPU as they are (pytorch issue 191763).
            built = getattr(torch.optim, algorithm)(model.parameters(), fused=algorithm == "AdamW", **settings)
            if self.rounds_updates:
                built.register_step_post_hook(_round)
            return built
        hf_lowprec.cast_model(model, keep_low_bits=self.rounding != "stochastic")
        return getattr(hf_lowprec, algorithm)(model.parameters(), rounding=self.rounding, **settings, **self.options)

    def precision(self, device: str = "cpu") -> AbstractContextManager[Any]:
        """The context of forward and loss on a device of this type."""
        return torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()


class MasterWeights(torch.optim.AdamW):
    """torch's AdamW on FP32 copies of a model's weights, which are the copies, rounded, after each step ("O2")."""

    def __init__(self, weights: list[nn.Parameter], masters: list[torch.Tensor], **settings: Any) -> None:
        super().__init__(masters, fused=True, **settings)
        self.weights, self.masters = weights, masters

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients in FP32, right before the step."""
        self._take_gradients()
        return nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._take_gradients()
        super().step()
        torch._foreach_copy_(self.weights, self.masters)

    def _take_gradients(self) -> None:
        pairs = [pair for pair in zip(self.weights, self.masters, strict=True) if pair[0].grad is not None]
        if pairs:
            gradients = [torch.empty_like(master) for _, master in pairs]
            torch._foreach_copy_(gradients, [weight.grad for weight, _ in pairs])
            for (weight, master), gradient in zip(pairs, gradients, strict=True):
                weight.grad, master.grad = None, gradient

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": self.masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        torch._foreach_copy_(self.masters, state_dict["masters"])


@torch.no_grad()
def _round(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.copy_(param.bfloat16())


INT8 = {"state_dtype": torch.int8}
WITHOUT = {"error_feedback": False}
MODES = {
    "fp32": Mode("FP32"),
    "autocast": Mode("FP32 weights, autocast", autocast=True),
    "nearest": Mode("BF16, rounded to nearest (torch)", weights=torch.bfloat16),
    "rounded": Mode("FP32, weights rounded to BF16 after each step", rounds_updates=True),
    "o2": Mode("BF16 weights with FP32 masters (O2)", masters=True),
    "split": Mode("split", "split"),
    "split-int8": Mode("split, 8-bit states", "split", options=INT8),
    "kahan": Mode("Kahan", "kahan"),
    "feedback": Mode("stochastic", "stochastic"),
    "feedback-int8": Mode("stochastic, 8-bit states", "stochastic", options=INT8),
    "factored-int8": Mode(
        "stochastic, factored second moment, 8-bit momentum", "stochastic", options=INT8 | {"factored": True}
    ),
    "sr": Mode("stochastic without feedback", "stochastic", options=WITHOUT),
    "sr-int8": Mode("stochastic without feedback, 8-bit states", "stochastic", options=INT8 | WITHOUT),
}
