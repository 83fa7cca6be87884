"""Rotary embeddings and other tables of frequencies stay in FP32: BF16 would round the frequencies."""

import re

from torch import nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.fp32_rules.norms import is_norm
from hf_lowprec.casting.module_tree import ModuleTree

_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_FREQUENCIES = re.compile(r"(\w+_)?inv_freq")


def rotary_embeddings(tree: ModuleTree) -> Fp32Parts:
    """Keep every rotary embedding and every table of frequencies."""
    class_names = {name: type(module).__name__ for name, module in tree.modules.items() if is_rotary(module)}
    return Fp32Parts({name: Reason("rotary", f"rotary ({class_name})") for name, class_name in class_names.items()})


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding by name, or has no parameters and a buffer named `inv_freq`.

    Modules that hold others with tensors are not. A rotary embedding converts its own outputs, so it gets no hooks.
    """
    has_frequencies = not module._parameters and any(map(_FREQUENCIES.fullmatch, module._buffers))
    if not has_frequencies and not any(_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    inner = any(part._parameters or part._buffers for part in module.modules() if part is not module)
    return not inner and not is_norm(module)
