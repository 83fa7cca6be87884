"""The low bits of weights in an optimizer: the compensation or remainder of each 16-bit weight.

They start as the low bits that a cast rounded off (`rounding/low_bits.py`), else as zero. With low bits, weights move
from the first step on, in proportion to the update. From zero, no weight moves before its updates add up to half a
spacing, as FP32 master weights that start from a BF16 checkpoint do.

`convert_states` takes them from one rounding mode to another. `fp32_state_dict` reads weight + low bits.
`keep_low_bits` hands them to the next optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.arguments import SHARED
from hf_lowprec.optim.param_groups import params_of, unwrap_optimizer
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import dtensor_like, flat_part, full_shape, global_places, local_shard, part_of
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, fp32_value, mode_name, round_nearest, round_stochastic
from hf_lowprec.rounding.attached_low_bits import (
    LOADED,
    attach_low_bits,
    attached_low_bits,
    is_replaced,
    remove_low_bits,
    replaced,
)
from hf_lowprec.rounding.low_bits import chunk_size, stored_pair
from hf_lowprec.rounding.modes import AUXILIARY_STATES, LOW_BITS_STATES
from hf_lowprec.rounding.random_bits import random_bits


def uses_low_bits(settings: Mapping[str, Any]) -> bool:
    """Return whether an optimizer with these keyword arguments starts with the low bits that a cast has kept."""
    return bool(MODES[mode_name(settings.get("rounding", SHARED["rounding"].default))].auxiliary)


def start_with_low_bits(low_bits_state: Tensor, param: Tensor) -> None:
    """Fill a new compensation or remainder, which is zero, with the low bits kept for `param`, if there are any."""
    if (kept := attached_low_bits(param)) is None:
        return
    if kept.dtype == low_bits_state.dtype == torch.int16:  # as `store_sums` would store it, in a third of the time
        local_shard(low_bits_state).copy_(kept)
    else:
        store_sums(param, low_bits_state, kept)


def initial_values(optimizer: Algorithm) -> Counter[str]:
    """Count the elements of 16-bit parameters by what their compensation or remainder starts with, or started with.

    Kinds: "low bits", "zero" and "values of a checkpoint or of earlier steps".
    """
    count: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for param in group["params"] if uses_low_bits(group) else ():
            if param.dtype not in LOW_PRECISION_DTYPES:
                continue
            if low_bits_state(optimizer.state.get(param, {})) is not None:
                kind = "values of a checkpoint or of earlier steps"
            else:
                kind = "zero" if attached_low_bits(param) is None else "low bits"
            count[kind] += param.numel()
    return +count


@without_grad
def reset_low_bits_of_other_weights(optimizer: Algorithm) -> int:
    """Set the compensations and remainders of weights that were replaced since the last step to zero.

    The cast model's `load_state_dict` records which these are (`note_loading`).

    Returns:
        The number of parameters whose compensation or remainder was not zero.
    """
    count = 0
    for param in replaced(params_of(optimizer)) if LOADED else ():
        if (state := low_bits_state(optimizer.state.get(param, {}))) is not None:
            count += bool(local_shard(state).any())
            state.zero_()
    return count


def zero_low_bits_of_other_weights(states: dict[Any, Any], keys: Iterable[tuple[Tensor, Any]]) -> None:
    """Do the same as `reset_low_bits_of_other_weights` in a copy of `optimizer.state` that is to be saved.

    Args:
        states: the entries of the parameters. They are replaced, not changed in place.
        keys: the parameters, each with the key of its entry.
    """
    for param, key in keys if LOADED else ():
        if is_replaced(param) and key in states:
            zeros = {name: torch.zeros_like(value) for name, value in states[key].items() if name in LOW_BITS_STATES}
            states[key] = {**states[key], **zeros}


def low_bits_state(optimizer_state: Mapping[str, Any]) -> Tensor | None:
    """Return the compensation or remainder in a parameter's entry of `optimizer.state`, or None."""
    return next((optimizer_state[name] for name in LOW_BITS_STATES if name in optimizer_state), None)


def store_sums(
    param: Tensor,
    low_bits: Tensor | None,
    held: Tensor,
    rounded: Callable[[Tensor, slice], Tensor] | None = None,
) -> None:
    """Store the FP32 sum of a parameter and `held` in the parameter and `low_bits`.

    Args:
        param: the 16-bit parameter.
        low_bits: as for `_store_values`.
        held: low bits of any form for `param`; a DTensor or this rank's shard.
        rounded: as for `_store_values`.
    """
    flat = local_shard(held).contiguous().view(-1)
    _store_values(param, low_bits, lambda weight, part: fp32_value(weight, flat[part].to(weight.device)), rounded)


def add_to_weights(param: Tensor, optimizer_state: Mapping[str, Any], change: Tensor, factor: float) -> None:
    """Add `factor * change` to a parameter and its compensation or remainder, in FP32, rounded to nearest.

    Args:
        param: the parameter, of any dtype.
        optimizer_state: its entry in `optimizer.state`.
        change: floating-point tensor of the shape of this rank's shard.
        factor: a number.
    """
    flat, held = change.reshape(-1), low_bits_state(optimizer_state)
    low_bits = None if held is None else local_shard(held).view(-1)

    def exact(weight: Tensor, part: slice) -> Tensor:
        value = weight.float() if low_bits is None else fp32_value(weight, low_bits[part].to(weight.device))
        return value + flat[part].to(weight.device, torch.float32) * factor

    _store_values(param, held, exact)


@without_grad
def _store_values(
    param: Tensor,
    low_bits: Tensor | None,
    values: Callable[[Tensor, slice], Tensor],
    rounded: Callable[[Tensor, slice], Tensor] | None = None,
) -> None:
    """Store FP32 values in a parameter, part by part, writing only where the stored values change.

    Args:
        param: the parameter.
        low_bits: BF16 for a compensation, int16 for a remainder; contiguous, sharded as `param` is. None if it has
            neither.
        values: `(weight, part) -> FP32 values` of some elements: their weights, and where they are in this rank's
            flattened shard.
        rounded: `(value, part) -> weight`, where there are no `low_bits`; to nearest by default.
    """
    shard = local_shard(param)
    flat = shard.contiguous().view(-1)
    target = None if low_bits is None else local_shard(low_bits).view(-1)
    moved: list[tuple[slice, Tensor]] = []
    size = chunk_size(param.device)
    for first in range(0, len(flat), size):
        part = slice(first, min(first + size, len(flat)))
        value = values(flat[part], part)
        if target is not None:
            weight, target[part] = stored_pair(value, flat.dtype, target.dtype)
        else:
            weight = (rounded(value, part) if rounded else round_nearest(value, flat.dtype)).to(flat.dtype)
        if not torch.equal(weight, flat[part]):
            moved.append((part, weight))
    for part, weight in moved:  # after all values, so that running out of memory leaves the weights unchanged
        flat[part] = weight
    if moved and flat.data_ptr() != shard.data_ptr():
        shard.copy_(flat.view(shard.shape))


# Another rounding mode: low bits are a part of the weight, and so are not lost when its group is given one.

CHANGE_STEP, CHANGE_ROLE = 0, 1
"""Step and role of the random bits of `convert_states`. Steps count from 1, so no step draws them."""


def states_of_other_modes(group: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> set[str]:
    """Return the names of the states that a 16-bit parameter has from an earlier rounding mode of its group."""
    own = {state.name for state in MODES[group["rounding"]].auxiliary}
    return (AUXILIARY_STATES.keys() - own) & optimizer_state.keys()


def convert_states(optimizer_state: dict[str, Any], param: Tensor, group: Mapping[str, Any], number: int) -> None:
    """Convert a parameter that was trained in another mode to the mode of `group`.

    With Kahan summation, its value is `weight + compensation`; with split weights, the master weight. It is rounded
    once, or stored as a new pair. This happens before the next step, and not when the mode changes or a checkpoint of
    another mode is loaded, since weights may be loaded after the optimizer.

    Args:
        optimizer_state: its entry in `optimizer.state`, with the states of the new mode.
        param: BF16 or FP16 parameter, which may be a DTensor; this rank's elements are changed in place.
        group: its parameter group, which has the new mode.
        number: its number in the random stream.
    """
    mode, formers = MODES[group["rounding"]], states_of_other_modes(group, optimizer_state)

    def rounded(value: Tensor, part: slice) -> Tensor:
        if not mode.random:
            return round_nearest(value, param.dtype)
        index = global_places(param, torch.arange(part.start, part.stop, device=value.device))
        bits = random_bits(seed=group["seed"], step=CHANGE_STEP, parameter=number, role=CHANGE_ROLE, index=index)
        return round_stochastic(value, bits)

    new = next((optimizer_state[state.name] for state in mode.auxiliary), None)
    # There are two if a step failed between creating one and filling it.
    former = max(formers, key=lambda name: bool(local_shard(optimizer_state[name]).any()))
    store_sums(param, new, optimizer_state[former], rounded)
    for name in formers:
        del optimizer_state[name]


# Estimates of the FP32 weights.

_NAMED = 3
"""The number of parameters that the warning names."""


@without_grad
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the best FP32 estimate of every tensor of `model.state_dict()`.

    For a split weight, it is the master weight, with all its bits. For a weight trained with Kahan summation, it is
    `weight + compensation`: about twice as many significant bits as the weight has. Before the first step, it is the
    weight plus the low bits that the cast kept. Every other floating-point tensor is simply converted. A warning names
    trainable 16-bit parameters that are not in `optimizer`, or whose optimizer is from another library.

    Args:
        model: the trained model.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Returns:
        FP32 copies under the names of `model.state_dict()`, tied tensors under each of their names. Tensors that are
        not floating point are returned unchanged. Under FSDP2, they are DTensors: before you save them, call
        `full_tensor()` on every rank, or use `hf_lowprec.save_pretrained` instead. Under DeepSpeed's ZeRO, every rank
        must call this function, and gets all tensors.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: it has none of the model's parameters.
    """
    estimate = fp32_estimates(model, optimizer)
    warn_of_weights_as_stored(model, optimizer)
    # From the parameters, since wrappers, such as those of activation checkpointing, add to names elsewhere.
    return {name: estimate(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def fp32_estimates(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the best FP32 estimate of one tensor of `model`.

    `fp32_state_dict` applies it to all tensors at once; weight averaging, to one at a time to save memory.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: it holds none of the model's parameters.
    """
    optimizer = _unwrapped(optimizer)
    if is_cut(optimizer):
        return _estimates_of_parts(model, optimizer)
    own = set(map(id, params_of(optimizer)))
    if not any(id(param) in own for param in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters; pass the one that trained this model")
    return fp32_estimator(optimizer)


def is_cut(optimizer: Any) -> bool:
    """Return whether the parameters of `optimizer` are parts of the model's, as under DeepSpeed's ZeRO."""
    return any(flat_part(param) is not None for param in params_of(optimizer))


def _estimates_of_parts(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Do the same as `fp32_estimates` for an optimizer that has other parts of the model's parameters on each rank.

    Every rank must call this function, and then the one that it returns, with the same tensors in the same order.
    """
    estimate = fp32_estimator(optimizer)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for param in params_of(optimizer):
        parts[part_of(param).name].append(param)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(parts))
    trained = set().union(*of_ranks)
    names = {id(param): name for name, param in model.named_parameters() if name in trained}

    def whole(tensor: Tensor) -> Tensor:
        name = names.get(id(tensor))
        if name is None:
            return estimate(tensor)
        # Each element is on one rank and zero on the others, and a sum of integers keeps the bits, also of -0.0.
        bits = torch.zeros(math.prod(full_shape(tensor)), dtype=torch.int32, device=tensor.device)
        for part in parts[name]:
            start = part_of(part).start
            bits[start : start + part.numel()] = estimate(part).view(torch.int32)
        dist.all_reduce(bits)
        return bits.view(torch.float32).view(full_shape(tensor))

    return whole


def fp32_estimator(optimizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the best FP32 estimate of a tensor, which `optimizer` may be training."""
    own = set(map(id, params_of(optimizer)))

    @without_grad
    def estimate(tensor: Tensor) -> Tensor:
        """Return an FP32 copy of a parameter or buffer, with all that is stored of it; other dtypes unchanged."""
        if not tensor.is_floating_point():
            return tensor
        held = None
        if id(tensor) in own:  # `state[tensor]` would create an entry for a parameter that was never stepped
            state = low_bits_state(optimizer.state.get(tensor, {}))
            held = attached_low_bits(tensor) if state is None or is_replaced(tensor) else local_shard(state)
        if held is None:
            return tensor.detach().to(torch.float32, copy=True)
        weight = local_shard(tensor).detach()
        return dtensor_like(fp32_value(weight, held.to(weight.device)), tensor)

    return estimate


def warn_of_weights_as_stored(model: nn.Module, optimizer: Any) -> None:
    """Warn about trainable 16-bit parameters for which `optimizer` has no compensation.

    It may be from another library, which has none, or not be the optimizer that trains them, which may have one.
    """
    optimizer = unwrap_optimizer(optimizer)
    if is_cut(optimizer):
        return
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


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers.

    Raises:
        TypeError: it is not an optimizer.
    """
    unwrapped = unwrap_optimizer(optimizer)
    if not isinstance(unwrapped, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` is a {type(optimizer).__name__}, not an optimizer")
    return unwrapped


@without_grad
def keep_low_bits(optimizer: Any) -> None:
    """Keep the compensations or remainders of `optimizer` with its parameters, for the next optimizer.

    An hf_lowprec optimizer with Kahan summation or split weights that is built later for the same parameters starts
    from the same FP32 weights. Trainer calls this function when training ends and, in a single process, also when an
    exception ends it. If the 16-bit values of a parameter change before the next optimizer's first step, nothing is
    kept for it.

    The tensors are shared with `optimizer`. They take extra memory, 2 bytes per parameter, once it is deleted.

    Args:
        optimizer: the optimizer, or accelerate's wrapper around it.

    Raises:
        TypeError: it is not an hf_lowprec optimizer.
    """
    optimizer = _unwrapped(optimizer)
    if not all("rounding" in group for group in optimizer.param_groups):
        raise TypeError(f"{type(optimizer).__name__} has no low bits to keep; pass an hf_lowprec optimizer")
    for param in params_of(optimizer):
        state = low_bits_state(optimizer.state.get(param, {}))
        if state is not None and param.dtype in LOW_PRECISION_DTYPES:
            attach_low_bits(param, local_shard(state))


def drop_low_bits(model: nn.Module) -> None:
    """Free the low bits kept for the next optimizer by `keep_low_bits`, `cast_model` or a Trainer.

    Use it if no training follows and memory is short.

    Args:
        model: the model. Its weights are not changed.
    """
    for param in model.parameters():
        remove_low_bits(param)
