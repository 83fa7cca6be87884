"""The low bits of weights in an optimizer: the compensation or remainder of each 16-bit weight.

They start as the low bits that a cast rounded off (`rounding/low_bits.py`), as a dither, or as zero. With zero, no
weight moves before its updates add up to half a spacing, so what the model computes with lags behind. With low bits or
a dither, weights move from the first step on, in proportion to the update.

`fp32_state_dict` reads weight + low bits. `keep_low_bits` hands them to the next optimizer.

A dither is not a part of the weight, and `fp32_state_dict` subtracts it. It is a pure function of seed, parameter
number and element, in units of the weight's spacing. A weight that has moved past a power of two has another spacing;
there the dither is known only to within half a spacing.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.parameter_numbers import number_of
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import (
    dtensor_like,
    flat_part,
    full_shape,
    global_indices,
    local_shard,
    part_of,
    sharding_of,
    sum_over_shards,
)
from hf_lowprec.optim.unwrap_optimizer import unwrap_given_optimizer, unwrap_optimizer
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, mode_name, round_nearest
from hf_lowprec.rounding.low_bits import (
    chunk_size,
    dither_stream_of,
    fp32_value,
    low_bits,
    set_low_bits,
    stored_pair,
)
from hf_lowprec.rounding.low_bits import drop_low_bits as drop_low_bits_of
from hf_lowprec.rounding.modes import LOW_BITS_STATES
from hf_lowprec.rounding.random_bits import dither, random_bits

_STEP, _ROLE = 0, 0
"""The dither's place in the stream of random bits; optimizer steps count from 1."""


def initialize_compensation(optimizer: Algorithm, compensation: Tensor, param: Tensor, seed: int, number: int) -> None:
    """Fill a new compensation or remainder with low bits or a dither, as `optimizer.initial_compensation` says.

    Args:
        optimizer: the optimizer; it notes whether the parameter is dithered.
        compensation: zeros, BF16 or int16, sharded as `param` is.
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
        flat, dither_to_subtract = kept.reshape(-1), dither_stream_of(param)
        if dither_to_subtract == (seed, number) and kept.dtype == compensation.dtype:  # it is this optimizer's own
            optimizer.dithered.add(param)
            dither_to_subtract = None

        def without_foreign_dither(weight: Tensor, part: slice, index: Tensor) -> Tensor:
            return undithered(weight, flat[part], index, dither_to_subtract)

        store_values(param, compensation, without_foreign_dither)
    else:

        def with_dither(weight: Tensor, part: slice, index: Tensor) -> Tensor:
            return weight.float() + _draw(weight, index, seed, number)

        store_values(param, compensation, with_dither)
        if _on_any_rank(bool(local_shard(compensation).any()), param):  # zeros are not dithered
            optimizer.dithered.add(param)


def _on_any_rank(condition: bool, param: Tensor) -> bool:
    """Return whether `condition` holds on a rank with a shard of `param`."""
    count = torch.tensor(float(condition), device=param.device)
    return bool(sum_over_shards(count, sharding_of(param)))


def warn_about_unused_low_bits(optimizer: Algorithm) -> None:
    """Warn if parameters that are about to be stepped have low bits, and `optimizer` has no use for them."""
    unused = [
        (group, param)
        for group in optimizer.param_groups
        for param in group["params"]
        if optimizer.gradient_of(param) is not None and not starts_with_low_bits(_settings(optimizer, group))
        if low_bits(param) is not None
    ]
    if unused:
        settings = _settings(optimizer, unused[0][0])
        modes = "'kahan'" if any(param.dtype == torch.float16 for _, param in unused) else "'split' or 'kahan'"
        warnings.warn(
            f"the low bits of {len(unused)} parameters, kept by cast_model(keep_low_bits=True) or an earlier Trainer, "
            f"are dropped: rounding={settings['rounding']!r} with "
            f"initial_compensation={settings['initial_compensation']!r} does not use them. Use rounding={modes} with "
            "initial_compensation='low_bits', or call hf_lowprec.drop_low_bits(model) first",
            RuntimeWarning,
            stacklevel=2,
        )


def _settings(optimizer: Algorithm, group: Mapping[str, Any]) -> dict[str, Any]:
    return {"rounding": group["rounding"], "initial_compensation": optimizer.initial_compensation}


def starts_with_low_bits(settings: Mapping[str, Any]) -> bool:
    """Return whether an optimizer with these keyword arguments starts with the low bits that a cast has kept."""
    mode = MODES[mode_name(settings.get("rounding", "kahan"))]
    low_bits_wanted = settings.get("initial_compensation", "low_bits") == "low_bits"
    return low_bits_wanted and any(state.holds_low_bits for state in mode.auxiliary)


def initial_values(optimizer: Algorithm) -> Counter[str]:
    """Count the elements of 16-bit parameters by what their compensation or remainder starts, or has started, with.

    Kinds: "low bits", "dither", "zero" and "values of a checkpoint or of earlier steps".
    """
    count: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for param in group["params"]:
            holds = any(state.holds_low_bits for state in optimizer.stored_states(group, param))
            if not holds:
                continue
            kind = optimizer.initial_compensation
            if low_bits_state(optimizer.state.get(param, {})) is not None:
                kind = "values of a checkpoint or of earlier steps"
            elif kind == "low_bits":
                kind = "dither" if low_bits(param) is None else "low bits"
            count[kind] += param.numel()
    return +count


def reset_outdated_compensations(optimizer: Algorithm) -> int:
    """Set compensations and remainders to zero if they are not the low bits kept for their weights.

    When other weights are loaded, these no longer belong to them.

    Returns:
        The number of parameters whose compensation or remainder was not zero.
    """
    count = 0
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        state = low_bits_state(optimizer.state.get(param, {}))
        if state is None or low_bits(param) is not None:
            continue
        drop_low_bits_of(param)
        count += bool(local_shard(state).any())
        state.zero_()
        optimizer.dithered.discard(param)
    return count


def low_bits_state(optimizer_state: Mapping[str, Any]) -> Tensor | None:
    """The compensation or remainder in a parameter's entry of `optimizer.state`; None if there is none."""
    return next((optimizer_state[name] for name in LOW_BITS_STATES if name in optimizer_state), None)


@without_grad
def fp32_values(param: Tensor, low_bits: Tensor, dither_stream: tuple[int, int] | None = None) -> Tensor:
    """The FP32 values that a parameter and its compensation or remainder hold, without the dither that it started with.

    Args:
        param: the parameter; plain, or a DTensor.
        low_bits: its compensation or remainder, or the low bits kept for it; a DTensor or this rank's shard.
        dither_stream: seed and number in the random stream of a dithered parameter.

    Returns:
        FP32 tensor of the shape of this rank's shard of `param`.
    """
    weight = local_shard(param).detach()
    low_bits = local_shard(low_bits).to(weight.device)
    if dither_stream is None:
        return fp32_value(weight, low_bits)
    flat, low_bits = weight.contiguous().view(-1), low_bits.contiguous().view(-1)
    values = torch.empty_like(flat, dtype=torch.float32)
    for part, index in chunks(param):
        values[part] = undithered(flat[part], low_bits[part], index, dither_stream)
    return values.view(weight.shape)


def undithered(weight: Tensor, low_bits: Tensor, index: Tensor, dither_stream: tuple[int, int] | None) -> Tensor:
    """The FP32 values of some elements, without the dither. `index` is their global indices."""
    if dither_stream is None:
        return fp32_value(weight, low_bits)
    dithered = weight.float() + _draw(weight, index, *dither_stream)
    held = fp32_value(*stored_pair(dithered, weight.dtype, low_bits.dtype)) - weight.float()  # of 8 bits at least
    return fp32_value(weight, low_bits, held)


def _draw(weight: Tensor, index: Tensor, seed: int, number: int) -> Tensor:
    """The dither of some weights, FP32.

    Args:
        weight: BF16 or FP16 tensor.
        index: their global indices.
        seed: the group's seed.
        number: the parameter's number in the random stream.
    """
    bits = random_bits(seed=seed, step=_STEP, parameter=number, role=_ROLE, index=index)
    return dither(weight, bits).nan_to_num(0.0, 0.0, 0.0)


@without_grad
def store_values(param: Tensor, low_bits: Tensor, values: Callable[[Tensor, slice, Tensor], Tensor]) -> None:
    """Store FP32 values in a parameter and its compensation or remainder.

    Args:
        param: the 16-bit parameter.
        low_bits: BF16 for a compensation, int16 for a remainder; contiguous, sharded as `param` is.
        values: as `change` of `change_weights`, but returns FP32 values.
    """
    target = local_shard(low_bits).view(-1)

    def change(weight: Tensor, part: slice, index: Tensor) -> Tensor:
        changed, target[part] = stored_pair(values(weight, part, index), weight.dtype, target.dtype)
        return changed

    change_weights(param, change)


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

    def exact(weight: Tensor, part: slice, index: Tensor) -> Tensor:
        value = weight.float() if low_bits is None else fp32_value(weight, low_bits[part].to(weight.device))
        return value + flat[part].to(weight.device, torch.float32) * factor

    def rounded(weight: Tensor, part: slice, index: Tensor) -> Tensor:
        return round_nearest(exact(weight, part, index), weight.dtype).to(weight.dtype)

    if held is None:
        change_weights(param, rounded)
    else:
        store_values(param, held, exact)


@without_grad
def change_weights(param: Tensor, change: Callable[[Tensor, slice, Tensor], Tensor]) -> None:
    """Give a parameter new values, part by part. It is written to only where that changes it.

    Args:
        param: the parameter.
        change: `(weight, part, index) -> new weight` of some elements: their weights, where they are in this rank's
            flattened shard, and their global indices.
    """
    shard = local_shard(param)
    flat = shard.contiguous().view(-1)
    moved: list[tuple[slice, Tensor]] = []
    for part, index in chunks(param):
        weight = change(flat[part], part, index)
        if not torch.equal(weight, flat[part]):
            moved.append((part, weight))
    for part, weight in moved:  # after all values, so that running out of memory leaves the weights unchanged
        flat[part] = weight
    if moved and flat.data_ptr() != shard.data_ptr():
        shard.copy_(flat.view(shard.shape))


def chunks(param: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of this rank's flattened shard of `param`, and the global indices of their elements."""
    first = 0
    for index in global_indices(param, chunk_size(param.device)):
        yield slice(first, first + len(index)), index
        first += len(index)


_NAMED = 3
"""The number of parameters that the warning names."""


@without_grad
def fp32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the best FP32 estimate of every tensor of `model.state_dict()`.

    For a split weight, it is the master weight, with all its bits. For a weight trained with Kahan summation, it is
    `weight + compensation`: about twice as many significant bits as the weight has. The dither that either may have
    started with is subtracted (see above). Before the first step, it is the weight plus the
    low bits that the cast kept. Every other floating-point tensor is simply converted. A warning names trainable
    16-bit parameters that are not in `optimizer`, or whose optimizer is from another library.

    Args:
        model: the trained model.
        optimizer: its optimizer, or accelerate's wrapper around it.

    Returns:
        FP32 copies under the names of `model.state_dict()`, tied tensors under each of their names. Tensors that are
        not floating point are returned unchanged. Under FSDP2, they are DTensors: before you save them, call
        `full_tensor()` on every rank, or use `hf_lowprec.save_pretrained` instead. Under DeepSpeed's ZeRO, every rank
        must call this function, and gets all of them.

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
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if is_cut(optimizer):
        return _estimates_of_parts(model, optimizer)
    own = set(map(id, params))
    if not any(id(param) in own for param in model.parameters()):
        raise ValueError("the optimizer has none of the model's parameters; pass the one that trained this model")
    return fp32_estimator(optimizer)


def is_cut(optimizer: Any) -> bool:
    """Return whether the parameters of `optimizer` are parts of the model's, as under DeepSpeed's ZeRO."""
    return any(flat_part(param) is not None for group in optimizer.param_groups for param in group["params"])


def _estimates_of_parts(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """`fp32_estimates` of an optimizer that has parts of the model's parameters, others on each rank.

    Every rank must call this function, and then the one that it returns, with the same tensors in the same order.
    """
    estimate = fp32_estimator(optimizer)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for param in group["params"]:
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
    streams = {id(param): stream for param, stream in random_streams(optimizer.param_groups)}

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
        for position, param in enumerate(group["params"], first):
            yield param, RandomStream(group.get("seed", 0), number_of(param, position, group))
        first += len(group["params"])


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


@without_grad
def keep_low_bits(optimizer: Any) -> None:
    """Keep the compensations or remainders of `optimizer` with its parameters, for the next optimizer.

    An hf_lowprec optimizer with Kahan summation or split weights that is built later for the same parameters begins
    with the FP32 weights of this one, as after `cast_model(keep_low_bits=True)`. Trainer calls this when training ends,
    and in a single process also when an exception ends it. If the 16-bit values of a parameter change before
    the next optimizer's first step, nothing is kept for it.

    The tensors are shared with `optimizer`. They take extra memory, 2 bytes per parameter, once it is deleted.

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
            dither_stream = stream if param in optimizer.dithered else None  # the dither is no part of the FP32 weight
            set_low_bits(param, local_shard(state), dither_stream)


def drop_low_bits(model: nn.Module) -> None:
    """Free the low bits kept for the next optimizer by `keep_low_bits`, `cast_model` or a Trainer.

    Use it if no training follows and memory is short.

    Args:
        model: the model. Its weights are not changed.
    """
    for param in model.parameters():
        drop_low_bits_of(param)
