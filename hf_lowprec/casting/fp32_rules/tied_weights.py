"""Tied weights: a tensor that one owner keeps in FP32 stays in FP32 for every owner."""

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree


def keep_tied_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Add to `parts` every tensor of a kept module, and every owner of a kept tensor that has no children.

    A module computes in one dtype, so such an owner is kept as a whole, with the other tensors in it. Those may be tied
    in turn: repeated until nothing is added.
    """
    kept_before = -1
    while kept_before != len(parts.modules):
        kept_before = len(parts.modules)
        for shared in tree.tensors:
            inside = next((owner.name for owner in shared.owners if parts.outermost(owner.module) is not None), None)
            if inside is not None:
                parts.tensors.setdefault(shared.name, Reason("tied", f"tied to {inside}"))
            if shared.name not in parts.tensors or not shared.is_shared:
                continue
            for owner in shared.owners:
                if not tree.modules[owner.module]._modules and parts.outermost(owner.module) is None:
                    other = inside or next(o.name for o in shared.owners if o.name != owner.name)
                    parts.modules[owner.module] = Reason("tied", f"tied to {other}")
