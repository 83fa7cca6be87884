"""Rotary embeddings, and other tables of frequencies, whose values were rounded before the cast."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES


def restore(module: nn.Module, name: str, tensor: Tensor, restored: list[str], warnings: list[str]) -> None:
    """Recompute a rotary table, already FP32 again, whose values all fit 16 bits; warn where impossible."""
    halves = [] if tensor.is_meta else [h for h in LOW_PRECISION_DTYPES if torch.equal(tensor, tensor.to(h).float())]
    if not halves:
        return
    exact = _table(module, name.rpartition(".")[2])
    if exact is not None and any(torch.equal(tensor.cpu(), exact.to(half).float()) for half in halves):
        restored += [name] * (not torch.equal(tensor.cpu(), exact))
        tensor.data.copy_(exact)
    else:
        warnings.append(f"{name} looks rounded to 16 bits and could not be recomputed")


def _table(module: nn.Module, name: str) -> Tensor | None:
    """The buffer of a second module of that class, made from the same config, as transformers makes it."""
    try:
        with torch.device("cpu"):
            twin: Any = type(module)(module.config)  # type: ignore[arg-type]
    except Exception:  # the constructor is anyone's
        return None
    table = twin._buffers.get(name)
    return table.float() if isinstance(table, Tensor) else None
