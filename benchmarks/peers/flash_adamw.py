"""FlashOptim's AdamW (arXiv 2602.23349) in torch operations, since its package, flashoptim, runs on CUDA alone.

Written from the published description, version 0.1.4 for what the paper leaves open:

- A master weight θ is a BF16 weight w, rounded to nearest, and an integer of 8 or 16 bits: (θ − w) in units of half an
  ulp of w, scaled to ±127 or ±32767.
- Groups of 32 elements share a scale in FP16, the largest magnitude of the group. The first moment
  over its scale, x, is stored as 127 · 2x / (1 + |x|) in a signed byte. Of the second moment, the square root is
  stored, as 255 · x in an unsigned byte. Both are rounded to nearest.
- The update is AdamW's in FP32, from moments before they are stored.

Unsloth's `adamw_flash` (`unsloth/optimizers/flash_adamw.py` of version 2026.10.9) is FlashAdamW with masters of 32
bits, a first moment in the dtype of the weights, rounded to nearest, and a second moment in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
_SMALLEST_SCALE = 1e-12
_CORRECTIONS = {24: torch.int8, 32: torch.int16}


class FlashAdamW(torch.optim.Optimizer):
    """AdamW with the formats above.

    Args:
        params: BF16 or FP32 parameters; FP32 ones have states in 8 bits and no correction.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        bits: of a master weight, 24 or 32.
        quantize: whether moments have 8 bits; False stores them as Unsloth does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bits: int = 24,
        quantize: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"bits": bits, "quantize": quantize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(group, param)

    def _step(self, group: dict[str, Any], param: Tensor) -> None:
        state = self.state[param]
        weight, grad = param.detach(), param.grad.float()
        if not state:
            state["step"] = 0
            self._store(state, group, torch.zeros_like(grad), torch.zeros_like(grad), weight.dtype)
            if weight.dtype == torch.bfloat16:
                state["correction"] = torch.zeros_like(weight, dtype=_CORRECTIONS[group["bits"]])
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        if group["quantize"]:
            first, second = decode_first(*first), decode_second(*second)
        first = first.float() * beta1 + grad * (1 - beta1)
        second = second * beta2 + grad * grad * (1 - beta2)
        mean, square = first / (1 - beta1 ** state["step"]), second / (1 - beta2 ** state["step"])
        moved = self.master(param) * (1 - group["lr"] * group["weight_decay"])
        moved -= group["lr"] * mean / (square.sqrt() + group["eps"])
        weight.copy_(moved)
        if "correction" in state:
            state["correction"] = correction(moved, weight, state["correction"].dtype)
        self._store(state, group, first, second, weight.dtype)

    @staticmethod
    def _store(state: dict[str, Any], group: dict[str, Any], first: Tensor, second: Tensor, dtype: torch.dtype) -> None:
        quantize = group["quantize"]
        state["exp_avg"] = encode_first(first) if quantize else first.to(dtype)
        state["exp_avg_sq"] = encode_second(second) if quantize else second

    def master(self, param: Tensor) -> Tensor:
        """The master weights of a parameter, FP32 in its shape."""
        weight, state = param.detach(), self.state.get(param, {})
        if "correction" not in state:
            return weight.float()
        stored = state["correction"]
        return weight.float() + stored.float() / torch.iinfo(stored.dtype).max * _half_ulp(weight)


def correction(master: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(master − weight) in units of half an ulp of the BF16 `weight`, as an integer of `dtype`."""
    share = ((master - weight.float()) / _half_ulp(weight)).clamp(-1, 1)
    scaled = share * torch.iinfo(dtype).max
    return (torch.floor(scaled.abs() + 0.5) * scaled.sign()).to(dtype)


def _half_ulp(weight: Tensor) -> Tensor:
    exponent = (weight.view(torch.int16).int() >> 7) & 0xFF
    return (exponent.clamp(min=1) << 23).view(torch.float32) * 2.0 ** (-7 - 1)


def encode_first(values: Tensor) -> tuple[Tensor, Tensor]:
    """First moments → signed codes in their shape, and FP16 scales per group."""
    groups = _groups(values)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=_SMALLEST_SCALE)
    share = groups / scale
    return _codes(2 * share / (1 + share.abs()) * 127, torch.int8, values), scale.flatten().half()


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `encode_first`, in FP32."""
    stored = _groups(codes.float()) / 127
    return _ungroup(stored / (2 - stored.abs()) * scale.float()[:, None], codes)


def encode_second(values: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments → unsigned codes of their square roots in their shape, and FP16 scales per group."""
    roots = _groups(values.sqrt())
    scale = roots.amax(1, keepdim=True).clamp(min=_SMALLEST_SCALE)
    return _codes(roots / scale * 255, torch.uint8, values), scale.flatten().half()


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `encode_second`, in FP32."""
    return _ungroup(_groups(codes.float()) / 255 * scale.float()[:, None], codes).square()


def _groups(values: Tensor) -> Tensor:
    """Rows of `GROUP` consecutive elements, the last one filled with zeros."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def _ungroup(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten()[: like.numel()].view(like.shape)


def _codes(scaled: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    return _ungroup(torch.floor(scaled + 0.5).to(dtype), like)
