"""FP32 estimates of trained weights: stored weight plus compensation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.optim.initial_compensation import subtract_dither
from hf_lowprec.optim.sharding import dtensor_like, local_shard
from hf_lowprec.optim.validation import first_parameter
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import low_bits

_NAMED = 3
"""The number of parameters that the warning names."""


@torch.no_grad()
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the best FP32 estimate of every tensor of `model.state_dict()`.

    For a weight trained with Kahan summation, it is `weight + compensation`, minus the dither that the compensation may
    have started with (see `optim/initial_compensation.py`): about twice as many significant bits as the weight has.
    Before the first step, it is the weight plus the low bits that its cast has kept. Every other floating-point tensor
    is simply converted. A warning names trainable 16-bit
    parameters that are not in `optimizer`, or whose optimizer is from another library.

    Args:
        model: the trained model.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Returns:
        FP32 copies under the names of `model.state_dict()`, tied tensors under each of their names. Tensors that are
        not floating point are returned unchanged.

    Raises:
        ValueError: `optimizer` has none of the model's parameters.
    """
    estimate = fp32_estimates(model, optimizer)
    warn_of_weights_as_stored(model, optimizer)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: estimate(named.get(name, tensor)) for name, tensor in model.state_dict().items()}


def fp32_estimates(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the best FP32 estimate of one tensor of `model`.

    `fp32_state_dict` applies it to all tensors at once; weight averaging, to one at a time to save memory.

    Raises:
        ValueError: `optimizer` holds none of the model's parameters.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    streams = dict(_random_streams(optimizer))
    if not any(id(param) in streams for param in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters; pass the one that trained this model")

    def estimate(tensor: Tensor) -> Tensor:
        """An FP32 copy of a parameter or buffer, with its compensation added; other dtypes as they are."""
        if not tensor.is_floating_point():
            return tensor
        weight = tensor.detach().to(torch.float32, copy=True)
        if id(tensor) not in streams:
            return weight
        # `state[tensor]` would create an entry for a parameter that was never stepped.
        compensation: Tensor | None = optimizer.state.get(tensor, {}).get("compensation")
        missing = low_bits(tensor) if compensation is None else local_shard(compensation)
        if missing is None:
            return weight
        if compensation is not None and tensor in optimizer.dithered:
            missing = subtract_dither(compensation, tensor, *streams[id(tensor)])
        return weight + dtensor_like(missing.float(), tensor)

    return estimate


class _RandomStream(NamedTuple):
    """What determines a parameter's random bits: the seed, and the parameter's number."""

    seed: int
    number: int


def _random_streams(optimizer: Any) -> Iterator[tuple[int, _RandomStream]]:
    """The identity and the random stream of each parameter of `optimizer`."""
    first = 0
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"], first + first_parameter(group)):
            yield id(param), _RandomStream(group.get("seed", 0), number)
        first += len(group["params"])


def warn_of_weights_as_stored(model: nn.Module, optimizer: Any) -> None:
    """Warn about trainable 16-bit parameters for which `optimizer` has no compensation.

    It may be from another library, which has none, or not be the optimizer that trains them, which may have one.
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
            f"{', '.join(names[:_NAMED])}{more}: their stored 16-bit values are used, since this "
            f"{type(optimizer).__name__} has no FP32 estimate of them; pass the hf_lowprec optimizer that trains "
            "them, or freeze what is not trained",
            RuntimeWarning,
            stacklevel=4,
        )
