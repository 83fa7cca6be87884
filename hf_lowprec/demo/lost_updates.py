"""Measure the share of AdamW's weight changes that rounding loses, by one definition for every optimizer compared.

For a sample of weights, the change `u` that AdamW computes in FP32 from the state before the step, and the change `Δ`
of what is stored after it: weight, plus compensation if the optimizer keeps one. The share is `1 - Σ u·Δ / Σ u²` over
all sampled steps: 0 if every change is stored, 1 if none is. Only the stored tensors are read, so the optimizer's own
arithmetic plays no part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLE = 2048
"""Elements sampled per parameter."""


@dataclass(frozen=True)
class _Expected:
    """What a coming step should change, at the sampled elements of a parameter.

    Attributes:
        param: the parameter.
        stored: its elements before the step, as `_stored` gives them.
        change: AdamW's change of them.
    """

    param: Tensor
    stored: Tensor
    change: Tensor


class LostUpdates:
    """Measures the share over sampled steps of any AdamW whose states have torch's names.

    Args:
        sample: elements per parameter to sample, evenly spaced.
    """

    def __init__(self, sample: int = SAMPLE) -> None:
        self.sample = sample
        self._expected: list[_Expected] = []
        self._square = self._product = 0.0

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute the changes that the coming step should make; call it when gradients are final, before the step."""
        factor = _clip_factor(optimizer)
        self._expected = [
            _Expected(param, self._stored(optimizer, param), self._exact_change(optimizer, group, param, factor))
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare with the changes that the step made; call it after `optimizer.step()`.

        Does nothing for a step without a call of `before_step`.
        """
        for expected in self._expected:
            stored_change = self._stored(optimizer, expected.param) - expected.stored
            self._square += float(expected.change.square().sum())
            self._product += float((expected.change * stored_change).sum())
        self._expected = []

    @property
    def share(self) -> float:
        """The share lost over all sampled steps; NaN if there was no change to store."""
        return 1 - self._product / self._square if self._square else float("nan")

    def _sample(self, tensor: Tensor) -> Tensor:
        """Evenly spaced elements of a tensor."""
        flat = tensor.detach().reshape(-1)
        count = min(self.sample, flat.numel())
        return flat[torch.arange(count, device=flat.device) * flat.numel() // max(count, 1)]

    def _stored(self, optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
        """The sampled weights as stored, in FP64: with the compensation if the optimizer keeps one."""
        stored = self._sample(param).double()
        compensation = optimizer.state[param].get("compensation")
        return stored if compensation is None else stored + self._sample(compensation).double()

    def _exact_change(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, factor: float
    ) -> Tensor:
        """AdamW's change of the sampled weights, computed in FP32 from the stored state."""
        state = optimizer.state[param]
        weight, grad = (self._sample(tensor).float() for tensor in (param, param.grad))  # type: ignore[arg-type]
        grad = grad * factor
        first, second = (
            self._sample(state[name]).float() if name in state else torch.zeros_like(weight)
            for name in ("exp_avg", "exp_avg_sq")
        )
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        step = int(state["step"]) + 1 if "step" in state else 1
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad.square()
        denominator = (second / (1 - beta2**step)).sqrt() + group["eps"]
        return (-lr * (first / (1 - beta1**step) / denominator + group["weight_decay"] * weight)).double()


def _clip_factor(optimizer: torch.optim.Optimizer) -> float:
    """The factor by which the step will clip gradients: our optimizers clip inside the step."""
    limit = getattr(optimizer, "limit", None)
    if limit is None:
        return 1.0
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    return min(1.0, limit / (norm + 1e-6))
