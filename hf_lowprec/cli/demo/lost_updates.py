"""The share of AdamW's weight changes that rounding swallows, by one definition for every optimizer that is compared.

For a sample of weights, the change `u` that AdamW computes in FP32 from the state before the step, and the change `Δ`
of what is stored after it: weight, plus compensation if the optimizer keeps one. The share is `1 - Σ u·Δ / Σ u²` over
all sampled steps: 0 if everything arrives, 1 if nothing does. It knows nothing of how the optimizer computes, only what
it stores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SAMPLE = 2048
"""Elements per parameter."""


class LostUpdates:
    """Sums over the steps it is shown. Works with any AdamW whose states have torch's names.

    Args:
        sample: elements per parameter to look at, evenly spread.
    """

    def __init__(self, sample: int = SAMPLE) -> None:
        self.sample = sample
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._square = self._product = 0.0

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call when gradients are final, before `optimizer.step()`."""
        factor = _clip_factor(optimizer)
        self._before = [
            (param, self._stored(optimizer, param), self._wanted(optimizer, group, param, factor))
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call after `optimizer.step()`; does nothing for a step that `before_step` did not see."""
        for param, stored, wanted in self._before:
            self._square += float(wanted.square().sum())
            self._product += float((wanted * (self._stored(optimizer, param) - stored)).sum())
        self._before = []

    @property
    def share(self) -> float:
        """The share lost in all sampled steps; NaN if there was no change to store."""
        return 1 - self._product / self._square if self._square else float("nan")

    def _sampled(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        taken = min(self.sample, flat.numel())
        return flat[torch.arange(taken, device=flat.device) * flat.numel() // max(taken, 1)]

    def _stored(self, optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
        stored = self._sampled(param).double()
        compensation = optimizer.state[param].get("compensation")
        return stored if compensation is None else stored + self._sampled(compensation).double()

    def _wanted(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, factor: float) -> Tensor:
        """AdamW's change of the sampled weights, in FP32, from the state as it is stored."""
        state = optimizer.state[param]
        weight, grad = (self._sampled(tensor).float() for tensor in (param, param.grad))  # type: ignore[arg-type]
        grad = grad * factor
        first, second = (
            self._sampled(state[name]).float() if name in state else torch.zeros_like(weight)
            for name in ("exp_avg", "exp_avg_sq")
        )
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        step = int(state["step"]) + 1 if "step" in state else 1
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad.square()
        denominator = (second / (1 - beta2**step)).sqrt() + group["eps"]
        return (-lr * (first / (1 - beta1**step) / denominator + group["weight_decay"] * weight)).double()


def _clip_factor(optimizer: torch.optim.Optimizer) -> float:
    """What gradients are still to be multiplied with: ours clip inside the step, and leave gradients as they are."""
    limit = getattr(optimizer, "limit", None)
    if limit is None:
        return 1.0
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    return min(1.0, limit / (norm + 1e-6))
