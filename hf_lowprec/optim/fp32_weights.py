"""FP32 estimates of trained weights: the master weight, or stored weight plus compensation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.initial_compensation import fp32_values, low_bits_state
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import dtensor_like
from hf_lowprec.optim.unwrap_optimizer import unwrap_given_optimizer, unwrap_optimizer
from hf_lowprec.optim.validation import first_parameter
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import dither_stream_of, low_bits

_NAMED = 3
"""The number of parameters that the warning names."""


@without_grad
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the best FP32 estimate of every tensor of `model.state_dict()`.

    For a split weight, it is the master weight, with all its bits. For a weight trained with Kahan summation, it is
    `weight + compensation`: about twice as many significant bits as the weight has. The dither that either may have
    started with is subtracted (see `optim/initial_compensation.py`). Before the first step, it is the weight plus the
    low bits that the cast kept. Every other floating-point tensor is simply converted. A warning names trainable
    16-bit parameters that are not in `optimizer`, or whose optimizer is from another library.

    Args:
        model: the trained model.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Returns:
        FP32 copies under the names of `model.state_dict()`, tied tensors under each of their names. Tensors that are
        not floating point are returned unchanged. Under FSDP2, they are DTensors: before you save them, call
        `full_tensor()` on every rank, or use `hf_lowprec.save_pretrained` instead.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: it has none of the model's parameters.
    """
    estimate = fp32_estimates(model, optimizer)
    warn_of_weights_as_stored(model, optimizer)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: estimate(named.get(name, tensor)) for name, tensor in model.state_dict().items()}


def fp32_estimates(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the best FP32 estimate of one tensor of `model`.

    `fp32_state_dict` applies it to all tensors at once; weight averaging, to one at a time to save memory.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: it holds none of the model's parameters.
    """
    optimizer = unwrap_given_optimizer(optimizer)
    streams = {id(param): stream for param, stream in random_streams(optimizer.param_groups)}
    if not any(id(param) in streams for param in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters; pass the one that trained this model")

    def estimate(tensor: Tensor) -> Tensor:
        """An FP32 copy of a parameter or buffer, with all that is stored of it; other dtypes as they are."""
        if not tensor.is_floating_point():
            return tensor
        # `state[tensor]` would create an entry for a parameter that was never stepped.
        state = low_bits_state(optimizer.state.get(tensor, {})) if id(tensor) in streams else None
        kept = low_bits(tensor) if id(tensor) in streams and state is None else state
        if kept is None:
            return tensor.detach().to(torch.float32, copy=True)
        own = streams[id(tensor)] if tensor in optimizer.dithered else None
        return dtensor_like(fp32_values(tensor, kept, dither_stream_of(tensor) if state is None else own), tensor)

    return estimate


class RandomStream(NamedTuple):
    """The source of a parameter's random bits: the seed, and the parameter's number."""

    seed: int
    number: int


def random_streams(groups: Iterable[ParamGroup]) -> Iterator[tuple[Any, RandomStream]]:
    """Each of the `params` of an optimizer's groups, in memory or read from a file, and its random stream."""
    first = 0
    for group in groups:
        for number, param in enumerate(group["params"], first + first_parameter(group)):
            yield param, RandomStream(group.get("seed", 0), number)
        first += len(group["params"])


def warn_of_weights_as_stored(model: nn.Module, optimizer: Any) -> None:
    """Warn about trainable 16-bit parameters for which `optimizer` has no compensation.

    It may be from another library, which has none, or not be the optimizer that trains them, which may have one.
    """
    optimizer = unwrap_optimizer(optimizer)
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
