"""Loss modules stay in FP32: a loss rounded to 16 bits hides small changes."""

import re

from torch import nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.fp32_rules.norms import is_norm
from hf_lowprec.casting.fp32_rules.rotary import is_rotary
from hf_lowprec.casting.module_tree import ModuleTree

_NAME = re.compile(r"(Loss|Criterion)$")


def losses(tree: ModuleTree) -> Fp32Parts:
    """Keep every loss module. Loss functions of models are in `loss_hooks.py`."""
    class_names = {name: type(module).__name__ for name, module in tree.modules.items() if is_loss(module)}
    return Fp32Parts({name: Reason("loss", f"loss ({class_name})") for name, class_name in class_names.items()})


def is_loss(module: nn.Module) -> bool:
    """Return whether a module is a loss, by the name of its class or a base class.

    With parameters other than single numbers (a temperature), it is a part of the model.
    """
    if not any(_NAME.search(cls.__name__) for cls in type(module).__mro__):
        return False
    return not any(parameter.dim() for parameter in module.parameters()) and not (is_norm(module) or is_rotary(module))
