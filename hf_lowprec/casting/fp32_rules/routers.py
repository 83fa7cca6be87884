"""Biases that choose experts stay in FP32: rounded, they would send tokens to other experts.

A router adds one to its scores only to find the highest of them. It steers the load, gets no gradient, and is often
larger than the scores, so that differences between these vanish in its rounding.
"""

import re

from torch import Tensor, nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.module_tree import ModuleTree

_NAME = re.compile(r"(\w+_)?(correction|experts?|balanc\w+)_bias(es)?")


def router_biases(tree: ModuleTree) -> Fp32Parts:
    """Keep biases that choose experts: by name, or as a buffer named bias of a module whose `forward` uses `topk`."""
    parts = Fp32Parts()
    for target in tree.tensors:
        for owner in target.owners:
            if _chooses_experts(target.tensor, owner.name.rpartition(".")[2], tree.modules[owner.module]):
                parts.tensors[target.name] = Reason("router", "bias that chooses experts")
    return parts


def _chooses_experts(tensor: Tensor, name: str, owner: nn.Module) -> bool:
    is_bias_by_topk = "bias" in name and not isinstance(tensor, nn.Parameter) and "topk" in names_in_forward(owner)
    has_no_gradient = "correction" in name or not tensor.requires_grad  # corrections are often declared as parameters
    return has_no_gradient and (is_bias_by_topk or _NAME.fullmatch(name) is not None)
