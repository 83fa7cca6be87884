"""Loss modules, and class weights of losses, stay in FP32: a loss rounded to 16 bits hides small changes."""

import re

from torch import Tensor, nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.fp32_rules.norms import is_norm
from hf_lowprec.casting.fp32_rules.rotary import is_rotary
from hf_lowprec.casting.hooks.forward_code import is_code_of_transformers, names_in_forward, uses_torch_losses
from hf_lowprec.casting.module_tree import ModuleTree, join, shape_of

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


def modules_with_torch_losses(tree: ModuleTree) -> list[str]:
    """The modules outside of transformers whose `forward` names one of torch's losses, except for losses themselves."""
    return [
        name
        for name, module in tree.modules.items()
        if uses_torch_losses(module) and not is_code_of_transformers(module) and not is_loss(module)
    ]


def loss_weights(tree: ModuleTree) -> Fp32Parts:
    """Keep class weights: frozen vectors with "weight" in their name that a `forward` with torch's losses uses.

    These losses compute in FP32, so weights in 16 bits would be rounded for nothing.
    """
    # A loss in a checkpoint computes in 16 bits (`torch_losses.py`), and torch takes no weights of another dtype in it.
    names = {name: names_in_forward(tree.modules[name]) for name in modules_with_torch_losses(tree)}
    used = {join(name, attribute) for name in names for attribute in names[name] if "checkpoint" not in names[name]}
    return Fp32Parts(
        tensors={
            target.name: Reason("loss", "weights of classes in a loss")
            for target in tree.tensors
            for owner in target.owners
            if owner.name in used and _is_class_weight(target.tensor, owner.name)
        }
    )


def _is_class_weight(tensor: Tensor, name: str) -> bool:
    is_vector = shape_of(tensor).numel() == max(shape_of(tensor), default=0)
    is_number = tensor.is_floating_point() and not tensor.requires_grad
    return "weight" in name.rpartition(".")[2] and is_vector and is_number
