"""Loads weights into a model's existing parameters, so that its optimizer can continue with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def load_in_place(model: nn.Module) -> Iterator[None]:
    """If parameters of `model` are replaced inside, copy their new values to the old parameters and restore those.

    PEFT's `load_adapter` replaces 16-bit adapters by new FP32 parameters. An optimizer that was built earlier would
    continue with the old ones, which no longer belong to the model. A new parameter of another shape is kept.
    """
    before = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    yield
    for owner, name, param in before:
        loaded = owner._parameters.get(name)
        if loaded is not None and loaded is not param and loaded.shape == param.shape:
            with torch.no_grad():
                param.copy_(loaded)
            owner._parameters[name] = param
