"""Look through accelerate's wrapper of an optimizer."""

from __future__ import annotations

from typing import Any


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's `AcceleratedOptimizer`, or `optimizer` itself if it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
