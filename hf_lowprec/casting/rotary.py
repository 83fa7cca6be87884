"""Rotary embeddings whose frequencies were rounded before the cast."""

import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting.policy import HALVES


def restore(module: nn.Module, name: str, tensor: Tensor, restored: list[str], warnings: list[str]) -> None:
    """Recompute a rotary table, already FP32 again, whose values all fit 16 bits; warn where impossible."""
    halves = [] if tensor.is_meta else [h for h in HALVES if torch.equal(tensor, tensor.to(h).float())]
    if not halves:
        return
    # transformers 5 names: `inv_freq`, `original_inv_freq`, with a layer type before if there are several.
    layer_type = re.sub(r"_?(original_)?inv_freq$", "", name.rpartition(".")[2])
    kind = getattr(module, "rope_type", None)
    kind = (kind.get(layer_type) if isinstance(kind, dict) else kind) or "default"
    build: Any = getattr(module, f"compute_{kind}_rope_parameters", getattr(module, "rope_init_fn", None))
    for cls in type(module).__mro__:
        build = build or getattr(sys.modules.get(cls.__module__), "ROPE_INIT_FUNCTIONS", {}).get(kind)
    try:
        with torch.device("cpu"):
            exact = build(module.config, **({"layer_type": layer_type} if layer_type else {}))[0]
        rounded = [exact.to(half).float().to(tensor.device) for half in halves]
    except (AttributeError, KeyError, TypeError, ValueError):
        exact, rounded = tensor.new_empty(0), []
    if any(torch.equal(tensor, values) for values in rounded):
        restored += [name] * (not torch.equal(tensor.cpu(), exact))
        tensor.data.copy_(exact)
    else:
        warnings.append(f"{name} looks rounded to 16 bits and could not be recomputed")
