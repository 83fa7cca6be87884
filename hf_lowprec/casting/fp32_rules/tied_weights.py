"""Tied weights: a tensor that one owner keeps in FP32 stays in FP32 for every owner."""

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree


def keep_tied_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Add to `parts` every tensor of a kept module, and every leaf module that owns a kept tensor.

    A module computes in one dtype, so such an owner is kept as a whole, with its other tensors. Those may be tied in
    turn, so this is repeated until nothing is added.
    """
    kept_before = -1
    while kept_before != len(parts.modules):
        kept_before = len(parts.modules)
        for tensor in tree.tensors:
            kept_owner = next(
                (owner.name for owner in tensor.owners if parts.outermost(owner.module) is not None), None
            )
            if kept_owner is not None:
                parts.tensors.setdefault(tensor.name, Reason("tied", f"tied to {kept_owner}"))
            if tensor.name not in parts.tensors or not tensor.is_shared:
                continue
            for owner in tensor.owners:
                if not tree.modules[owner.module]._modules and parts.outermost(owner.module) is None:
                    other = kept_owner or next(o.name for o in tensor.owners if o.name != owner.name)
                    parts.modules[owner.module] = Reason("tied", f"tied to {other}")
