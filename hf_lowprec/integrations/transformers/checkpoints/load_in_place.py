"""Loads weights into a model's existing parameters, so that its optimizer can continue with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import keep_low_bits


@contextmanager
def load_in_place(model: nn.Module, keeping_low_bits: bool = False) -> Iterator[None]:
    """If parameters of `model` are replaced inside, copy their new values to the old parameters and restore those.

    PEFT's `load_adapter` replaces 16-bit adapters by new FP32 parameters. An optimizer that was built earlier would
    continue with the old ones, which no longer belong to the model. A new parameter of another shape is kept.

    Args:
        model: the model.
        keeping_low_bits: keep what copying FP32 values to 16-bit parameters rounds off, for the optimizer.
    """
    before = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    yield
    for owner, name, param in before:
        loaded = owner._parameters.get(name)
        if loaded is not None and loaded is not param and loaded.shape == param.shape:
            with torch.no_grad():
                param.copy_(loaded)
            if keeping_low_bits and param.dtype in LOW_PRECISION_DTYPES and loaded.dtype == torch.float32:
                keep_low_bits(param, loaded.detach())
            owner._parameters[name] = param
