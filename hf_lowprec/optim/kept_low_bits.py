"""Hands what an optimizer holds of weights beyond 16 bits to the next optimizer of the same parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_lowprec.optim.fp32_weights import random_streams
from hf_lowprec.optim.initial_compensation import low_bits_state
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.unwrap_optimizer import unwrap_given_optimizer
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import drop_low_bits as drop_low_bits_of
from hf_lowprec.rounding.low_bits import set_low_bits


@without_grad
def keep_low_bits(optimizer: Any) -> None:
    """Keep the compensations or remainders of `optimizer` with its parameters, for the next optimizer.

    An hf_lowprec optimizer with Kahan summation or split weights that is built later for the same parameters begins
    with the FP32 weights of this one, as after `cast_model(keep_low_bits=True)`. Trainer calls this when training ends,
    and in a single process also when an exception ends it. If the 16-bit values of a parameter change
    before the next optimizer's first step, nothing is kept for it.

    The tensors are shared with `optimizer`. They take extra memory, 1 or 2 bytes per parameter, once it is deleted.

    Args:
        optimizer: the optimizer, or accelerate's wrapper around it.

    Raises:
        TypeError: it is not an hf_lowprec optimizer.
    """
    optimizer = unwrap_given_optimizer(optimizer)
    if not all("rounding" in group for group in optimizer.param_groups):
        raise TypeError(f"{type(optimizer).__name__} has no low bits to keep; pass an hf_lowprec optimizer")
    for param, stream in random_streams(optimizer.param_groups):
        state = low_bits_state(optimizer.state.get(param, {}))
        if state is not None and param.dtype in LOW_PRECISION_DTYPES:
            set_low_bits(param, local_shard(state), stream if param in optimizer.dithered else None)


def drop_low_bits(model: nn.Module) -> None:
    """Free the low bits kept for the next optimizer by `keep_low_bits`, `cast_model` or a Trainer.

    Use it if no training follows and memory is short.

    Args:
        model: the model. Its weights are not changed.
    """
    for param in model.parameters():
        drop_low_bits_of(param)
