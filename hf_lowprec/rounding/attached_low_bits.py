"""Low bits attached to a parameter, as an attribute, until an optimizer takes them into its state.

A cast attaches what it rounds off the FP32 weights, 2 bytes per element. The optimizer takes them over when it creates
the parameter's state (`optim/state/fp32_weights.py`). When a Trainer has finished, the compensation or remainder of its
optimizer is attached for the next one.

While an optimizer has them, `note_loading` notes that `load_state_dict` may have replaced their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hf_lowprec.rounding.low_bits import ROUNDED_OFF_DTYPES, chunk_size, rounded_off
from hf_lowprec.rounding.nearest import LOW_PRECISION_DTYPES

_ATTRIBUTE = "_low_bits"
_BEFORE_LOADING = "_weights_before_loading"
"""The attribute of a parameter whose low bits are in an optimizer: None, or, while `load_state_dict` may have replaced
the weights, the checksum of those that the low bits belong to."""
LOADED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""The parameters with such a checksum, by identity."""


class _LowBits(NamedTuple):
    low_bits: Tensor
    weight_checksum: list[int]


def attach_rounded_off(param: Tensor, exact: Tensor) -> bool:
    """Attach to the 16-bit `param` what it lacks of `exact`.

    If that is zero everywhere, nothing is attached. BF16 parameters lose no bit, except where the FP32 value was
    halfway between two BF16 numbers and was rounded down: it becomes the next smaller FP32 number. An even weight has
    such a value on either side, and 16 bits cannot hold both, see `split.py`.

    Args:
        param: a BF16 or FP16 parameter: `exact`, rounded to nearest. For a DTensor, this rank's shard counts.
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
    attach_low_bits(param, kept.view(_local(param).shape))
    return True


def attach_low_bits(param: Tensor, low_bits: Tensor) -> None:
    """Attach `low_bits` to `param`, without copying them.

    Args:
        param: a BF16 or FP16 parameter.
        low_bits: int16 or BF16 (see `low_bits.py`), of the shape of `param`; of this rank's shard for a DTensor.
    """
    setattr(param, _ATTRIBUTE, _LowBits(low_bits, _checksum(param)))
    if id(param) in LOADED:
        low_bits_belong(param)


def attached_low_bits(param: Tensor) -> Tensor | None:
    """Return the low bits attached to `param`, int16 or BF16 (see `low_bits.py`), on its device.

    They have its shape; for a DTensor, the shape of this rank's shard.

    Return None if there are none, or if the weight has changed since: after a checkpoint was loaded, for example, they
    belong to other weights.
    """
    kept: _LowBits | None = getattr(param, _ATTRIBUTE, None)
    if kept is None or param.dtype not in LOW_PRECISION_DTYPES or kept.low_bits.shape != _local(param).shape:
        return None
    return kept.low_bits.to(param.device) if _checksum(param) == kept.weight_checksum else None


def remove_low_bits(param: Tensor) -> None:
    """Remove the low bits attached to `param`, if there are any."""
    vars(param).pop(_ATTRIBUTE, None)
    vars(param).pop(_BEFORE_LOADING, None)
    LOADED.pop(id(param), None)


def low_bits_belong(param: Tensor) -> None:
    """Note that an optimizer has low bits of the weights that `param` has now."""
    setattr(param, _BEFORE_LOADING, None)
    LOADED.pop(id(param), None)


def note_loading(module: nn.Module, *_: Any) -> None:
    """Note which weights the low bits of `module`'s parameters belong to. A pre-hook of `load_state_dict`."""
    for param in module.parameters(recurse=False):
        if vars(param).get(_BEFORE_LOADING, ()) is None and param.dtype in LOW_PRECISION_DTYPES:
            setattr(param, _BEFORE_LOADING, _checksum(param))
            LOADED[id(param)] = param


def is_replaced(param: Tensor) -> bool:
    """Return whether `load_state_dict` has given `param` other weights than the low bits in its optimizer belong to."""
    return id(param) in LOADED and getattr(param, _BEFORE_LOADING) != _checksum(param)


def replaced(params: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the replaced `params`. Afterwards, the low bits in the optimizer count as belonging to the new weights."""
    for param in params:
        if is_replaced(param):
            yield param
        if id(param) in LOADED:
            low_bits_belong(param)


def low_bits_to_save(param: Tensor) -> dict[str, Any] | None:
    """Return the low bits attached to `param`, as a state dict can hold them; None if there are none."""
    kept: _LowBits | None = getattr(param, _ATTRIBUTE, None)
    return None if kept is None else kept._asdict()


def are_saved_low_bits(saved: Mapping[str, Any]) -> bool:
    """Return whether `saved` has the keys and types of what `low_bits_to_save` returns."""
    checksum = saved.get("weight_checksum")
    types_fit = isinstance(checksum, list | tuple) and [*map(type, checksum)] == [int] * 3
    return types_fit and isinstance(saved.get("low_bits"), Tensor)


def restore_saved_low_bits(param: Tensor, saved: dict[str, Any]) -> None:
    """Attach the low bits that `low_bits_to_save` returned. Their weights may be loaded later."""
    setattr(param, _ATTRIBUTE, _LowBits(saved["low_bits"], list(saved["weight_checksum"])))


def _local(param: Tensor) -> Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


def _checksum(param: Tensor) -> list[int]:
    """Sum the bit patterns of all weights, of every 7th and of every 13th, so that permutations are noticed."""
    patterns = _local(param).detach().contiguous().view(torch.int16).flatten()
    return torch.stack([patterns[::stride].sum(dtype=torch.int64) for stride in (1, 7, 13)]).tolist()
