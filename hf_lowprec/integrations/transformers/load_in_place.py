"""Weights that are loaded into a model land in the parameters that it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def same_parameters(model: nn.Module) -> Iterator[None]:
    """Whatever inside replaces parameters of `model` has its values moved into those that were there, in their dtypes.

    PEFT's `load_adapter` puts new FP32 parameters in the place of 16-bit adapters, trained or not: an optimizer that
    was built before would go on with the old ones, which no longer belong to the model. Parameters of another shape
    are left as they are.
    """
    before = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    yield
    for owner, name, param in before:
        loaded = owner._parameters.get(name)
        if loaded is not None and loaded is not param and loaded.shape == param.shape:
            with torch.no_grad():
                param.copy_(loaded)
            owner._parameters[name] = param
