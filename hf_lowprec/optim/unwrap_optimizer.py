"""Unwrap accelerate's wrapper around an optimizer."""

from __future__ import annotations

from typing import Any


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's `AcceleratedOptimizer`; return anything else, None included, unchanged.

    The argument is untyped because this layer may not import accelerate.
    """
    return getattr(optimizer, "optimizer", optimizer)
