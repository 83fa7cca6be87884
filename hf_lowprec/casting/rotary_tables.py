"""Rotary tables, and other tables of frequencies, that had been rounded to 16 bits: recomputes them from the config."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import LOW_PRECISION_DTYPES

Restoration = Literal["not rounded", "recomputed", "lost"]


def restore_table(module: nn.Module, attribute: str, table: Tensor) -> Restoration:
    """Recompute a table if all of its values fit 16 bits and the config gives the values they were rounded from.

    Args:
        module: owns the table; made again from `module.config`, as transformers makes it.
        attribute: the table's name in `module`.
        table: the buffer, in FP32 already; changed in place.

    Returns:
        "lost" if the table looks rounded and the config gives others.
    """
    if table.is_meta:
        return "not rounded"
    rounded_to = [dtype for dtype in LOW_PRECISION_DTYPES if torch.equal(table, table.to(dtype).float())]
    if not rounded_to:
        return "not rounded"
    exact = _table_from_config(module, attribute)
    if exact is None or not any(torch.equal(table.cpu(), exact.to(dtype).float()) for dtype in rounded_to):
        return "lost"
    if torch.equal(table.cpu(), exact):
        return "not rounded"
    table.data.copy_(exact)
    return "recomputed"


def _table_from_config(module: nn.Module, attribute: str) -> Tensor | None:
    """The buffer in a second module of that class, made from the same config."""
    try:
        with torch.device("cpu"):
            second: Any = type(module)(module.config)  # type: ignore[arg-type]
    except Exception:  # the constructor may be anyone's
        return None
    table = second._buffers.get(attribute)
    return table.float() if isinstance(table, Tensor) else None
