"""Class weights in a model stay in FP32: torch's losses compute in FP32, and 16-bit weights would be rounded."""

from torch import Tensor

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.hooks.torch_losses import modules_with_torch_losses
from hf_lowprec.casting.module_tree import ModuleTree, join


def loss_weights(tree: ModuleTree) -> Fp32Parts:
    """Keep frozen vectors with "weight" in their name that a `forward` with torch's losses uses."""
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
    is_vector = tensor.dim() > 0 and tensor.numel() == max(tensor.shape)
    is_number = tensor.is_floating_point() and not tensor.requires_grad
    return "weight" in name.rpartition(".")[2] and is_vector and is_number
