"""FP32 estimates of trained weights: stored weight plus compensation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_NAMED = 3
"""Parameters that the warning names."""


@torch.no_grad()
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The best FP32 estimate of every tensor of `model.state_dict()`.

    For a weight that trains with Kahan summation it is `weight + compensation`, which has about twice as many
    significant bits as the weight. Every other floating-point tensor is converted as it is. A warning names 16-bit
    parameters in training that `optimizer` does not hold, or that an optimizer of another library trains.

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
    warn_of_weights_as_stored(model, optimizer)
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
        """An FP32 copy of a parameter or buffer, with its compensation added; other dtypes as they are."""
        if not tensor.is_floating_point():
            return tensor
        weight = tensor.detach().to(torch.float32, copy=True)
        if groups.get(id(tensor), {}).get("rounding") == "kahan":
            # `state[tensor]` would create an entry for a parameter that was never stepped.
            compensation = optimizer.state.get(tensor, {}).get("compensation")
            weight = weight if compensation is None else weight + compensation.float()
        return weight

    return estimate


def warn_of_weights_as_stored(model: nn.Module, optimizer: Any) -> None:
    """Warn of 16-bit parameters in training of which `optimizer` knows no more than what is stored.

    It may be one of another library, which has no compensation, or not the one that trains them, which may have one.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    stepped = {id(p) for group in optimizer.param_groups if "rounding" in group for p in group["params"]}
    names = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype in LOW_PRECISION_DTYPES and id(param) not in stepped
    ]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(
            f"{', '.join(names[:_NAMED])}{more}: taken as they are stored in 16 bits, since this "
            f"{type(optimizer).__name__} holds no FP32 estimate of them; give the optimizer of hf_lowprec that trains "
            "them, or freeze what is not trained",
            RuntimeWarning,
            stacklevel=4,
        )
