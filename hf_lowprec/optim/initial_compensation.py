"""The compensation that a weight starts with: the low bits that a cast rounded off, a random dither, or zero.

With a compensation of zero, no weight moves before its updates add up to half a spacing, so what the model computes
with lags behind. With low bits or a dither, weights move from the first step on, in proportion to the update.

A dither is not a part of the weight, and `fp32_state_dict` subtracts it. It is a pure function of seed, parameter
number and element, in units of the weight's spacing. A weight that has moved past a power of two has another spacing;
there the dither is known only to within half a spacing.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.sharding import global_indices, local_shard, sharding_of, sum_over_shards
from hf_lowprec.rounding import MODES, mode_name
from hf_lowprec.rounding.dither import as_compensation, dither
from hf_lowprec.rounding.low_bits import chunk_size, low_bits
from hf_lowprec.rounding.random_bits import random_bits

_STEP, _ROLE = 0, 0
"""The dither's place in the stream of random bits; optimizer steps count from 1."""


def initialize_compensation(optimizer: Algorithm, compensation: Tensor, param: Tensor, seed: int, number: int) -> None:
    """Fill a new compensation with low bits or a dither, as `optimizer.initial_compensation` says.

    Args:
        optimizer: the optimizer; it notes whether the parameter is dithered.
        compensation: zeros, sharded as `param` is.
        param: the 16-bit parameter.
        seed: its group's seed.
        number: its number in the random stream.
    """
    optimizer.dithered.discard(param)
    if optimizer.initial_compensation == "zero":
        return
    kept = low_bits(param) if optimizer.initial_compensation == "low_bits" else None
    # All ranks must come to the same conclusions, since they save one state dict.
    is_missing = _on_any_rank(kept is None, param)
    if kept is not None and not is_missing:
        local_shard(compensation).copy_(kept)
    else:
        _add_dither(local_shard(compensation), param, seed, number)
        if _on_any_rank(bool(local_shard(compensation).any()), param):  # zeros are not dithered
            optimizer.dithered.add(param)


def _on_any_rank(condition: bool, param: Tensor) -> bool:
    """Whether `condition` holds on a rank with a shard of `param`."""
    count = torch.tensor(float(condition), device=param.device)
    return bool(sum_over_shards(count, sharding_of(param)))


def warn_about_unused_low_bits(optimizer: Algorithm) -> None:
    """Warn if parameters that are about to be stepped have low bits, and `optimizer` has no use for them."""
    unused = [
        (group, param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None and not starts_with_low_bits(_settings(optimizer, group))
        if low_bits(param) is not None
    ]
    if unused:
        settings = _settings(optimizer, unused[0][0])
        warnings.warn(
            f"the low bits that cast_model(keep_low_bits=True) has kept of {len(unused)} parameters are dropped: "
            f"rounding={settings['rounding']!r} with initial_compensation={settings['initial_compensation']!r} has no "
            "use for them. Use rounding='kahan' with initial_compensation='low_bits', or cast without keep_low_bits",
            RuntimeWarning,
            stacklevel=2,
        )


def _settings(optimizer: Algorithm, group: Mapping[str, Any]) -> dict[str, Any]:
    return {"rounding": group["rounding"], "initial_compensation": optimizer.initial_compensation}


def starts_with_low_bits(settings: Mapping[str, Any]) -> bool:
    """Whether an optimizer with these keyword arguments starts with the low bits that a cast has kept."""
    mode = MODES[mode_name(settings.get("rounding", "kahan"))]
    low_bits_wanted = settings.get("initial_compensation", "low_bits") == "low_bits"
    return low_bits_wanted and any(state.holds_low_bits for state in mode.auxiliary)


def initial_values(optimizer: Algorithm) -> Counter[str]:
    """Count the elements of 16-bit parameters whose compensation starts, or has started, with each kind of value.

    Kinds: "low bits", "dither", "zero" and "from a checkpoint or earlier steps".
    """
    count: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for param in group["params"]:
            holds = any(state.holds_low_bits for state in optimizer.stored_states(group, param.dtype))
            if not holds or param.dtype == torch.float32:
                continue
            kind = optimizer.initial_compensation
            if "compensation" in optimizer.state.get(param, {}):
                kind = "from a checkpoint or earlier steps"
            elif kind == "low_bits":
                kind = "dither" if low_bits(param) is None else "low bits"
            count[kind] += param.numel()
    return count


def reset_compensations(optimizer: Algorithm) -> None:
    """Set all compensations to zero, because other weights were loaded."""
    for values in optimizer.state.values():
        if isinstance(values, dict) and "compensation" in values:
            values["compensation"].zero_()
    optimizer.dithered.clear()


@torch.no_grad()
def subtract_dither(compensation: Tensor, param: Tensor, seed: int, number: int) -> Tensor:
    """The compensation without the dither that it started with.

    Args:
        compensation: of a dithered parameter, BF16, sharded as `param` is.
        param: the parameter; plain, or a DTensor.
        seed: its group's seed.
        number: its number in the random stream.

    Returns:
        FP32 tensor of the shape of this rank's shard of `param`.
    """
    result = local_shard(compensation).float()
    _add_dither(result, param, seed, number, sign=-1.0)
    return result


def _add_dither(target: Tensor, param: Tensor, seed: int, number: int, sign: float = 1.0) -> None:
    """Add the dither, rounded to BF16, times `sign`, to a contiguous `target` of the shape of this rank's shard."""
    weight, flat = local_shard(param).contiguous().view(-1), target.view(-1)
    first = 0
    for index in global_indices(param, chunk_size(weight.device)):
        part = slice(first, first + len(index))
        bits = random_bits(seed=seed, step=_STEP, parameter=number, role=_ROLE, index=index)
        flat[part] += as_compensation(weight[part], dither(weight[part], bits)).to(target.dtype) * sign
        first = part.stop
