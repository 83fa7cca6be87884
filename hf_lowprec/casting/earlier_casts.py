"""Find earlier casts of a model by the mark that they leave on every module, and models prepared before their cast."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_lowprec.casting.fp32_rules import Entry
from hf_lowprec.casting.private_torch_apis import has_run_under_fsdp2
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name
from hf_lowprec.rounding.attached_low_bits import note_loading

_ATTRIBUTE = "_low_precision_cast"
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_BEFORE_AUTOCAST = "_original_forward"
"""The attribute with a model's own `forward` after an accelerator has replaced it by one that runs under autocast."""
PREPARED_UNCAST: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that were prepared for training (by an Accelerator) before they were cast. The layers above add them."""


@dataclass(frozen=True)
class CastMark:
    """The note that a cast leaves on a module."""

    dtype: torch.dtype
    keep_fp32: tuple[Entry, ...] = ()  # on the module that `cast_model` was called with, else empty


def marks_in(model: nn.Module) -> list[CastMark]:
    """Return the marks in a model; empty if neither it nor a part of it was cast."""
    return [mark for module in model.modules() if (mark := vars(module).get(_ATTRIBUTE)) is not None]


def was_cast(module: nn.Module) -> bool:
    """Return whether a cast has left its mark on this module itself."""
    return _ATTRIBUTE in vars(module)


def cast_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes to which `cast_model` has cast the model or parts of it; empty if it was not cast."""
    return {mark.dtype for mark in marks_in(model)}


def earlier_entries(model: nn.Module) -> tuple[Entry, ...]:
    """Return the `keep_fp32` entries of earlier casts of the model and of its parts, which stay in effect."""
    return tuple(dict.fromkeys(entry for mark in marks_in(model) for entry in mark.keep_fp32))


def set_marks(model: nn.Module, dtype: torch.dtype, keep_fp32: Iterable[Entry]) -> None:
    """Mark every module of a model as cast, and the model itself with its entries of `keep_fp32`.

    The modules note when `load_state_dict` gives them other weights than the low bits in an optimizer belong to.
    """
    entries = tuple(dict.fromkeys((*earlier_entries(model), *keep_fp32)))
    for module in model.modules():
        if _ATTRIBUTE not in vars(module):
            setattr(module, _ATTRIBUTE, CastMark(dtype))
            module.register_load_state_dict_pre_hook(note_loading)
    setattr(model, _ATTRIBUTE, CastMark(dtype, entries))


def remove_mark(module: nn.Module) -> None:
    """Remove the mark of one module."""
    vars(module).pop(_ATTRIBUTE, None)


def runs_under_autocast(model: nn.Module) -> bool:
    """Return whether an accelerator has wrapped `forward` of `model` in autocast, as it does for mixed precision."""
    return _BEFORE_AUTOCAST in vars(model)


def check_model_and_dtype(model: nn.Module, named: torch.dtype | str) -> torch.dtype:
    """Return the dtype, which may be given by name.

    Raises:
        ValueError: it is invalid or differs from an earlier cast's, or the model is wrapped or prepared.
    """
    dtype = {dtype_name(known): known for known in LOW_PRECISION_DTYPES}.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, not {named!r}")
    # transformers shards a model while it loads it, so a cast cannot come before.
    sharded_at_load = bool(getattr(model, "is_distributed_loading_by_transformers", False))
    if (tp_size := getattr(model, "tp_size", None) or 1) > 1 and not sharded_at_load:
        raise ValueError(
            f"the model is tensor parallel (tp_size={tp_size}), and this version of transformers does not say that it "
            "was sharded while loading; upgrade transformers to 5.23 and pass from_pretrained a DistributedConfig"
        )
    wrappers = _WRAPPERS - {"FSDPModule"} if sharded_at_load else _WRAPPERS
    for module in model.modules():
        if found := wrappers.intersection(cls.__name__ for cls in type(module).__mro__):
            raise ValueError(f"the model is already wrapped or sharded ({min(found)}); call cast_model before that")
        if has_run_under_fsdp2(module) and not was_cast(module):
            raise ValueError(
                f"FSDP2 has already gathered the parameters of {type(module).__name__} in their present dtype; call "
                "cast_model before the first forward pass"
            )
        if runs_under_autocast(module):
            raise ValueError(
                f"{type(module).__name__} runs under autocast: an Accelerator or Trainer with mixed precision has "
                "prepared it. Call accelerator.unwrap_model(model, keep_fp32_wrapper=False) before cast_model(model)"
            )
        if module in PREPARED_UNCAST:
            raise ValueError(
                f"{type(module).__name__} was already prepared for training; call cast_model(model) before "
                "accelerator.prepare"
            )
    if earlier_dtypes := {str(earlier) for earlier in cast_dtypes(model) if earlier != dtype}:
        raise ValueError(f"the model was already cast to {min(earlier_dtypes)}; load it again to cast it to {dtype}")
    return dtype
