"""Asks a model about its adapters, by attributes and functions that PEFT and transformers document."""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any

from torch import Tensor, nn


def is_peft(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model, whose folders hold its adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model, or was given adapters by its own `add_adapter` or `load_adapter`."""
    return bool(getattr(model, "peft_config", None))


def saved_adapters(
    model: Any, state_dict: dict[str, Tensor], left_out: Container[str] = ()
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that PEFT saves for each adapter of `model`, by name, taken from `state_dict`."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # saving the model warns again
        return {
            adapter: get_peft_model_state_dict(model, state_dict=state_dict, adapter_name=adapter)
            for adapter in model.peft_config
            if adapter not in left_out
        }
