"""The mark that a cast leaves on every module. A later call recognizes it, even on a part of the model."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_lowprec.casting.keep_fp32_entries import Entry
from hf_lowprec.rounding.attached_low_bits import note_loading

_ATTRIBUTE = "_low_precision_cast"
PREPARED_UNCAST: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that were prepared for training (by an Accelerator) before they were cast. The layers above add them."""


@dataclass(frozen=True)
class CastMark:
    """The note that a cast leaves on a module."""

    dtype: torch.dtype
    keep_fp32: tuple[Entry, ...] = ()  # on the module that `cast_model` was called with, else empty


def marks_in(model: nn.Module) -> list[CastMark]:
    """The marks in a model; empty if neither it nor a part of it was cast."""
    return [mark for module in model.modules() if (mark := vars(module).get(_ATTRIBUTE)) is not None]


def was_cast(module: nn.Module) -> bool:
    """Return whether a cast has left its mark on this module itself."""
    return _ATTRIBUTE in vars(module)


def cast_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes to which `cast_model` has cast the model or parts of it; empty if it was not cast."""
    return {mark.dtype for mark in marks_in(model)}


def earlier_entries(model: nn.Module) -> tuple[Entry, ...]:
    """The `keep_fp32` entries of earlier casts of the model and of its parts, which stay in effect."""
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
