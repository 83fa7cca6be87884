"""The keyword arguments that every algorithm has, shown in its signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict

import torch


class Shared(TypedDict, total=False):
    """The keyword arguments that every algorithm hands on to `LowPrecisionOptimizer`."""

    rounding: str
    state_dtype: torch.dtype | Mapping[str, torch.dtype] | None
    state_rounding: str
    seed: int
    first_parameter: int | None
    backend: str
    capturable: bool
    max_grad_norm: float | None
    skip_nonfinite: bool


def signature(algorithm: Any, base: Any) -> inspect.Signature:
    """The signature of an algorithm's constructor, with the keywords of `base` in the place of `**shared`."""
    own = inspect.signature(algorithm.__init__).parameters.values()
    shared = inspect.signature(base.__init__).parameters
    parameters = [p for p in own if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    if algorithm.__init__ is not base.__init__ and any(p.kind is p.VAR_KEYWORD for p in own):
        parameters += [shared[name] for name in Shared.__annotations__]
    return inspect.Signature(parameters)
