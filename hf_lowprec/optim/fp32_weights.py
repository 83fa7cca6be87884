"""FP32 estimates of trained weights: stored weight plus compensation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The best FP32 estimate of every tensor of `model.state_dict()`.

    A weight trained with Kahan summation is `weight + compensation`, which holds about twice the digits of the weight
    alone; every other floating-point tensor is converted as it is.

    Args:
        model: the trained model.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Returns:
        FP32 copies under the names of `model.state_dict()`, tied tensors under each of their names. Tensors that are
        not floating point are returned as they are.

    Raises:
        ValueError: `optimizer` holds none of the model's parameters.
    """
    estimate = fp32_estimates(model, optimizer)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: estimate(named.get(name, tensor)) for name, tensor in model.state_dict().items()}


def fp32_estimates(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """A function that returns the best FP32 estimate of one tensor of `model`.

    `fp32_state_dict` applies it to all tensors at once; weight averaging, to one at a time to save memory.

    Raises:
        ValueError: `optimizer` holds none of the model's parameters.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in groups for param in model.parameters()):
        raise ValueError("the optimizer holds none of the model's parameters; give the one that trained this model")

    def estimate(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        weight = tensor.detach().to(torch.float32, copy=True)
        if groups.get(id(tensor), {}).get("rounding") == "kahan":
            compensation = optimizer.state[tensor].get("compensation")
            weight = weight if compensation is None else weight + compensation.float()
        return weight

    return estimate
