"""The low bits of an FP32 weight, which a cast to 16 bits rounds off, kept beside the parameter until training begins.

They come in two forms:

- A BF16 difference, as Kahan's compensation: 8 bits of what the weight lacks, for BF16 and FP16 weights.
- An int16 remainder, see `split.py`: all that a BF16 weight lacks.

They are an attribute of the `Parameter`, 2 bytes per element, from the cast until the optimizer has created the
parameter's state. When a Trainer has finished, they are the compensation or remainder of its optimizer, kept for the
next one (see `optim/state/low_bits.py` for both).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hf_lowprec.rounding.nearest import LOW_PRECISION_DTYPES, round_nearest
from hf_lowprec.rounding.split import join, split

ROUNDED_OFF_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.bfloat16}
"""The dtypes of the low bits that a cast rounds off, by dtype of the weight: remainders, and differences."""


def fp32_value(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The number that a weight and its low bits hold together.

    Args:
        weight: BF16, FP16 or FP32 tensor of 16-bit numbers.
        low_bits: BF16 (or FP32) or int16 tensor of the same shape.

    Returns:
        FP32 tensor of the same shape.
    """
    if low_bits.is_floating_point():
        return weight.float() + low_bits.float()
    return join(weight.float(), low_bits.int())


def fp64_value(weight: Tensor, low_bits: Tensor | None) -> Tensor:
    """The number that a weight and its low bits, if there are any, hold together; FP64, without rounding."""
    if low_bits is None or low_bits.is_floating_point():
        return weight.double() if low_bits is None else weight.double() + low_bits.double()
    return join(weight.float(), low_bits.int()).double()


def rounded_off(value: Tensor, weight: Tensor) -> Tensor:
    """The low bits that a cast of `value` to `weight` rounds off.

    Args:
        value: FP32 tensor of any shape.
        weight: BF16 or FP16 tensor of the same shape: `value`, rounded to nearest, ties to even.

    Returns:
        int16 tensor of the same shape for BF16 weights: remainders, but at most 32767, where a tie needs 32768. BF16
        for FP16 weights.
    """
    dtype = ROUNDED_OFF_DTYPES[weight.dtype]
    if dtype.is_floating_point:
        return as_compensation(weight, value - weight.float())
    remainder = value.view(torch.int32) - weight.float().view(torch.int32)
    return remainder.clamp(-0x8000, 0x7FFF).to(dtype)


def stored_pair(value: Tensor, dtype: torch.dtype, low_bits_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and the low bits that hold `value` together with it, for a weight that is trained on.

    Args:
        value: FP32 tensor of any shape.
        dtype: of the weight; BF16 or FP16.
        low_bits_dtype: BF16 for a compensation, int16 for a remainder, which needs a BF16 weight.

    Returns:
        `(weight, low bits)` of these dtypes.
    """
    if low_bits_dtype.is_floating_point:
        weight = round_nearest(value, dtype).to(dtype)
        return weight, as_compensation(weight, value - weight.float())
    weight, remainder = split(value)
    return weight.to(dtype), remainder.to(low_bits_dtype)


def as_compensation(weight: Tensor, low_bits: Tensor) -> Tensor:
    """Round what an FP32 value has beyond a stored `weight` to BF16, such that weight + result still rounds to weight.

    Half a spacing is a tie, which goes to the even weight. So the low bits of even weights are rounded to nearest, and
    may become half a spacing; those of odd weights are truncated.

    Args:
        weight: BF16 or FP16 tensor of any shape.
        low_bits: FP32 tensor of the same shape, the FP32 value minus `weight`, which that value rounds to.

    Returns:
        BF16 tensor of the same shape. Values that are not finite become zero.
    """
    truncated = (low_bits.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    is_odd = (weight.view(torch.int16) & 1).bool()
    return torch.where(is_odd, truncated, low_bits.to(torch.bfloat16)).nan_to_num_(0.0, 0.0, 0.0)


_ATTRIBUTE = "_low_bits"


class _LowBits(NamedTuple):
    low_bits: Tensor
    weight_checksum: list[int]


def keep_low_bits(param: Tensor, exact: Tensor) -> bool:
    """Keep what the 16-bit `param` lacks of `exact` as an attribute of `param`.

    If that is nothing, nothing is kept: the FP32 values were 16-bit numbers already. BF16 parameters lose no bit,
    except that ties which the cast has rounded down are kept as the next smaller FP32 number, since 16 bits cannot hold
    both ties beside an even weight, see `split.py`.

    Args:
        param: a BF16 or FP16 parameter: `exact`, rounded to nearest. Of a DTensor, this rank's shard is meant.
        exact: FP32 or FP16 tensor of the same shape, placed in the same way.

    Returns:
        Whether there is a difference.
    """
    weights, exacts = _local(param).detach().reshape(-1), _local(exact).reshape(-1)
    kept = torch.empty_like(weights, dtype=ROUNDED_OFF_DTYPES[param.dtype])
    chunk = chunk_size(weights.device)
    for first in range(0, len(weights), chunk):
        part = slice(first, first + chunk)
        kept[part] = rounded_off(exacts[part].float(), weights[part])
    if not kept.any():
        return False
    set_low_bits(param, kept.view(_local(param).shape))
    return True


def set_low_bits(param: Tensor, low_bits: Tensor) -> None:
    """Keep `low_bits` as an attribute of `param`, without copying them.

    Args:
        param: a BF16 or FP16 parameter.
        low_bits: int16 or BF16 (see above), of the shape of `param`; of this rank's shard for a DTensor.
    """
    setattr(param, _ATTRIBUTE, _LowBits(low_bits, _checksum(param)))
    if id(param) in LOADED:
        low_bits_belong(param)


def low_bits(param: Tensor) -> Tensor | None:
    """The low bits kept for `param`, int16 or BF16 (see above), on its device.

    They have its shape, for a DTensor that of this rank's shard.

    None if there are none, and if the weight has changed since: after a checkpoint was loaded, for example, they belong
    to other weights.
    """
    kept: _LowBits | None = getattr(param, _ATTRIBUTE, None)
    if kept is None or param.dtype not in LOW_PRECISION_DTYPES or kept.low_bits.shape != _local(param).shape:
        return None
    return kept.low_bits.to(param.device) if _checksum(param) == kept.weight_checksum else None


def drop_low_bits(param: Tensor) -> None:
    """Forget the low bits kept for `param`, if there are any."""
    vars(param).pop(_ATTRIBUTE, None)
    vars(param).pop(_BEFORE_LOADING, None)
    LOADED.pop(id(param), None)


_BEFORE_LOADING = "_weights_before_loading"
"""The attribute of a parameter whose low bits are in an optimizer: None, or the checksum of the weights that they
belong to, while `load_state_dict` may have replaced these."""
LOADED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""The parameters with such a checksum, by identity."""


def low_bits_belong(param: Tensor) -> None:
    """Note that an optimizer has low bits of the weights that `param` has now."""
    setattr(param, _BEFORE_LOADING, None)
    LOADED.pop(id(param), None)


def note_loading(module: nn.Module, *_: Any) -> None:
    """Pre-hook of `load_state_dict`: note which weights the low bits of the parameters of `module` belong to."""
    for param in module.parameters(recurse=False):
        if vars(param).get(_BEFORE_LOADING, ()) is None and param.dtype in LOW_PRECISION_DTYPES:
            setattr(param, _BEFORE_LOADING, _checksum(param))
            LOADED[id(param)] = param


def is_replaced(param: Tensor) -> bool:
    """Return whether `load_state_dict` has given `param` other weights than the low bits in its optimizer belong to."""
    return id(param) in LOADED and getattr(param, _BEFORE_LOADING) != _checksum(param)


def replaced(params: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield those of `params` that are replaced. Then, the low bits in the optimizer belong to the present weights."""
    for param in params:
        if is_replaced(param):
            yield param
        if id(param) in LOADED:
            low_bits_belong(param)


def low_bits_to_save(param: Tensor) -> dict[str, Any] | None:
    """The low bits kept for `param`, as a state dict can hold them; None if there are none."""
    kept: _LowBits | None = getattr(param, _ATTRIBUTE, None)
    return None if kept is None else kept._asdict()


def are_saved_low_bits(saved: Mapping[str, Any]) -> bool:
    """Return whether `saved` has the keys and types of what `low_bits_to_save` returns."""
    checksum = saved.get("weight_checksum")
    types_fit = isinstance(checksum, list | tuple) and [*map(type, checksum)] == [int] * 3
    return types_fit and isinstance(saved.get("low_bits"), Tensor)


def restore_saved_low_bits(param: Tensor, saved: dict[str, Any]) -> None:
    """Keep the low bits that `low_bits_to_save` has returned. The weights that they belong to may be loaded later."""
    setattr(param, _ATTRIBUTE, _LowBits(saved["low_bits"], list(saved["weight_checksum"])))


def chunk_size(device: torch.device) -> int:
    """Elements that are computed at once: on a CPU, few enough for the temporaries to stay in the cache; on a GPU, few
    enough for them to take little memory.
    """
    return (1 << 15) * min(torch.get_num_threads(), 4) if device.type == "cpu" else 1 << 20


def _local(param: Tensor) -> Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


def _checksum(param: Tensor) -> list[int]:
    """Sums of the weights' bit patterns: of all, of every 7th and of every 13th, so that permutations are noticed."""
    patterns = _local(param).detach().contiguous().view(torch.int16).flatten()
    return torch.stack([patterns[::stride].sum(dtype=torch.int64) for stride in (1, 7, 13)]).tolist()
