"""Asks a model about its adapters, by attributes that PEFT and transformers document."""

from __future__ import annotations

from torch import nn


def is_peft(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model, whose folders hold its adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model, or was given adapters by its own `add_adapter` or `load_adapter`."""
    return bool(getattr(model, "peft_config", None))
