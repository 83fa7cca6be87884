"""Norms stay in FP32: torch's classes, and others by the name of their class."""

import re

from torch import nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree

_CLASSES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NAME = re.compile(r"Norm(\d+[a-z]?|Gated|PerHead|Layer)*$", re.IGNORECASE)


def norms(tree: ModuleTree) -> Fp32Parts:
    """Keep every norm."""
    class_names = {name: type(module).__name__ for name, module in tree.modules.items() if is_norm(module)}
    return Fp32Parts({name: Reason("norm", f"norm ({class_name})") for name, class_name in class_names.items()})


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its class or by the name of its class or a base class.

    What holds other modules with tensors is a norm only if those are norms. By name alone, whole encoders
    (Wav2Vec2EncoderStableLayerNorm) and norms that own linear layers would count.
    """
    names = (cls.__name__ for cls in type(module).__mro__)
    if not isinstance(module, _CLASSES) and not any(map(_NAME.search, names)):
        return False
    inner = (part for part in module.modules() if part is not module and (part._parameters or part._buffers))
    return all(map(is_norm, inner))
