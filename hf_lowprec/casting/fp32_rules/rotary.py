"""Rotary embeddings, Fourier features and other tables of frequencies stay in FP32: BF16 would round the frequencies.

Tables that had been rounded before the cast are recomputed from the config.
"""

import re
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.fp32_rules.norms import is_norm
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_FOURIER = re.compile(r"Fourier(Projection|Embedding|Features)$")
_FREQUENCIES = re.compile(r"(\w+_)?inv_freq")


def rotary_embeddings(tree: ModuleTree) -> Fp32Parts:
    """Keep every rotary embedding, every table of frequencies and, with hooks, every module of Fourier features."""
    class_names = {name: type(module).__name__ for name, module in tree.modules.items()}
    rotary = {name: f"rotary ({class_names[name]})" for name, module in tree.modules.items() if is_rotary(module)}
    fourier = {name: f"Fourier features ({cls})" for name, cls in class_names.items() if _FOURIER.search(cls)}
    return Fp32Parts({name: Reason("rotary", text) for name, text in (fourier | rotary).items()})


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding by name, or has no parameters and a buffer named `inv_freq`.

    Modules that hold others with tensors are not. A rotary embedding converts its own outputs, so it gets no hooks.
    """
    has_frequencies = not module._parameters and any(map(_FREQUENCIES.fullmatch, module._buffers))
    if not has_frequencies and not any(_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    inner = any(part._parameters or part._buffers for part in module.modules() if part is not module)
    return not inner and not is_norm(module)


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
