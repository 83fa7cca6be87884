"""The keyword arguments of the optimizers: those that all algorithms share, and how signatures show them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch

from hf_lowprec.rounding import Rounding, StateRounding

InitialCompensation = Literal["low_bits", "dither", "zero"]
"""The values of the argument `initial_compensation`."""
Backend = Literal["auto", "triton", "native", "eager"]
"""The values of the argument `backend`."""

Clip = Literal["exact", "delayed"]
"""The values of the argument `clip`."""


class Shared(TypedDict, total=False):
    """The keyword arguments that every algorithm passes on to `LowPrecisionOptimizer`, which documents them."""

    rounding: Rounding
    state_dtype: torch.dtype | Mapping[str, torch.dtype] | None
    state_rounding: StateRounding
    seed: int
    first_parameter: int | None
    initial_compensation: InitialCompensation
    backend: Backend
    capturable: bool
    max_grad_norm: float | None
    skip_nonfinite: bool
    gradient_release: bool
    clip: Clip


def full_signature(algorithm: type, base: type) -> inspect.Signature:
    """The signature of `algorithm` with `**shared` replaced by the keywords of `base`.

    It makes `help()`, editors and `inspect.signature` show them. `LowPrecisionOptimizer.__init_subclass__` sets it.
    """
    parameters_of_init = inspect.signature(algorithm.__init__).parameters.values()  # type: ignore[misc]
    shared = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    parameters = [p for p in parameters_of_init if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    if algorithm.__init__ is not base.__init__ and any(p.kind is p.VAR_KEYWORD for p in parameters_of_init):  # type: ignore[misc]
        parameters += [shared[name] for name in Shared.__annotations__]
    return inspect.Signature(parameters)


def keywords(cls: Any) -> dict[str, Any]:
    """The keyword arguments of an optimizer class and their defaults. The result is cached: do not modify it."""
    return _keywords(cls)


@functools.cache  # a separate function, because to type checkers optimizer classes are not hashable
def _keywords(cls: Any) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "params"}
