"""Modules and tensors that a model's class names in `_keep_in_fp32_modules` stay in FP32, and what many do not name.

transformers keeps those that are named when it loads a model. Not every model with experts names the biases that choose
them: a router adds one to its scores only to find the highest, so a rounded bias would send tokens to other experts.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.module_tree import ModuleTree

_ATTRIBUTES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_BIAS_OF_EXPERTS = re.compile(r"(\w+_)?(correction|experts?|balanc\w+)_bias(es)?")


def named_by_model_class(tree: ModuleTree) -> Fp32Parts:
    """Keep what the model's class, or the class of a model inside, names."""
    return Fp32Parts.combine(
        _matches(tree, prefix, search, Reason("model class", f"named in {type(module).__name__}.{attribute}"))
        for prefix, module in tree.modules.items()
        for attribute in _ATTRIBUTES
        if (search := _search(module, attribute)) is not None
    )


def _search(module: nn.Module, attribute: str) -> Callable[[str], Any] | None:
    """Searches a name for the expressions that an attribute lists; None if it lists none."""
    # Not getattr: PEFT's wrappers forward it to the model inside, where names have another prefix.
    listed = vars(module).get(attribute, getattr(type(module), attribute, None))
    if not isinstance(listed, list | tuple | set | frozenset) or not listed:
        return None
    return re.compile("|".join(sorted(listed)).replace("*", ".*")).search


def _matches(tree: ModuleTree, prefix: str, search: Callable[[str], Any], reason: Reason) -> Fp32Parts:
    """The modules and tensors below the module `prefix` whose names from there on match."""
    start = f"{prefix}." if prefix else ""

    def matches(name: str) -> bool:
        return name.startswith(start) and search(name[len(start) :]) is not None

    modules = dict.fromkeys(filter(matches, tree.modules), reason)
    # A tensor is kept alone: around one that is named (routers, sinks) the model's own code converts.
    tensors = {t.name: reason for t in tree.tensors if any(matches(owner.name) for owner in t.owners)}
    return Fp32Parts(modules, tensors)


def biases_that_choose_experts(tree: ModuleTree) -> Fp32Parts:
    """Keep them by their names, and each buffer named bias of a module whose `forward` uses `topk`."""
    parts = Fp32Parts()
    for owner, target in ((place, each) for each in tree.tensors for place in each.owners):
        name, is_buffer = owner.name.rpartition(".")[2], not isinstance(target.tensor, nn.Parameter)
        by_topk = is_buffer and "bias" in name and "topk" in names_in_forward(tree.modules[owner.module])
        untrained = "correction" in name or not target.tensor.requires_grad  # some declare corrections as parameters
        if untrained and (by_topk or _BIAS_OF_EXPERTS.fullmatch(name)):
            parts.tensors[target.name] = Reason("router", "bias that chooses experts")
    return parts
