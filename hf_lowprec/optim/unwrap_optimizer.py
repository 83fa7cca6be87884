"""Unwrap accelerate's wrapper around an optimizer."""

from __future__ import annotations

from typing import Any

import torch

_MOST_WRAPPERS = 4
"""accelerate's and DeepSpeed's are three. A `Mock` has any number of them."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's and DeepSpeed's wrappers; return anything else, None too, unchanged.

    The argument is untyped because this layer may not import accelerate.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        inner = getattr(inner, "optimizer", inner)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def unwrap_given_optimizer(optimizer: Any) -> Any:
    """`unwrap_optimizer` for the argument of a public function, which is checked.

    Raises:
        TypeError: it is no optimizer.
    """
    unwrapped = unwrap_optimizer(optimizer)
    if not isinstance(unwrapped, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` is a {type(optimizer).__name__}, not an optimizer")
    return unwrapped
