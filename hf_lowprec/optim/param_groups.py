"""The parameters of an optimizer, which may be wrapped, and the numbers of its parameters.

A parameter's number selects its random bits (see `random_bits`). It is the parameter's position in the optimizer. For
parameters that have an optimizer each, such as to step during the backward pass, it would always be 0: all would round
alike, and their errors would add up instead of averaging out. Optimizers of one parameter are therefore numbered in the
order of construction.

Optimizers of several parameters all start at 0, so that two runs in one process can be compared.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup
from hf_lowprec.optim.arguments import SHARED
from hf_lowprec.optim.sharding import flat_part

_MOST_WRAPPERS = 4
"""The largest number of wrappers: accelerate and DeepSpeed have three. A `Mock` has any number of them."""

_constructed: Counter[Hashable] = Counter()
"""One-parameter optimizers constructed since the last step of any optimizer, by kind."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's and DeepSpeed's wrappers; return all else, including None, unchanged.

    The argument is untyped because this layer may not import accelerate.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(inner, "optimizer", inner)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def params_of(optimizer: torch.optim.Optimizer, param_ids: Set[int] | None = None) -> list[Tensor]:
    """Return the optimizer's parameters in its order; with `param_ids`, only those with these identities."""
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    return params if param_ids is None else [param for param in params if id(param) in param_ids]


def number_if_single(optimizer: Algorithm) -> None:
    """Let a new optimizer with a single parameter draw other random bits than earlier ones of its kind.

    Its `first_parameter` becomes the number of earlier ones; the default, 0, is left out.
    """
    if [len(group["params"]) for group in optimizer.param_groups] != [1]:
        return
    # Optimizers of different kinds belong to runs that are being compared, so they must draw the same bits.
    settings = {**vars(optimizer), **optimizer.defaults}
    kind = (type(optimizer), *(str(settings.get(name)) for name in SHARED), isinstance(settings["lr"], Tensor))
    before = _constructed[kind]
    _constructed[kind] += 1
    if before:
        optimizer.defaults["first_parameter"] = optimizer.param_groups[0]["first_parameter"] = before


def reset_numbers() -> None:
    """Restart the numbers at 0. Every step calls this: optimizers constructed after a step belong to another run."""
    _constructed.clear()


def number_of(param: Tensor, position: int, group: ParamGroup) -> int:
    """Return the number of a parameter, which selects its random bits.

    Args:
        param: the parameter.
        position: its position in the optimizer.
        group: its param group.
    """
    part = flat_part(param)
    return (position if part is None else part.number) + operator.index(group.get("first_parameter") or 0)
