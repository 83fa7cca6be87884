"""The result of the rules: the modules and tensors that stay in FP32, each with a reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hf_lowprec.casting.module_tree import ModuleTree

Rule = Literal["quantized", "class", "norm", "rotary", "loss", "router", "matrix", "model class", "keep_fp32", "tied"]


@dataclass(frozen=True)
class Reason:
    """The reason why something stays in FP32."""

    rule: Rule
    text: str  # for people


@dataclass
class Fp32Parts:
    """The parts of a model that stay in FP32.

    A module is kept with everything below it, and gets hooks that convert its inputs and outputs. A tensor that is
    kept alone gets none: the code around it has to convert.
    """

    modules: dict[str, Reason] = field(default_factory=dict)
    tensors: dict[str, Reason] = field(default_factory=dict)  # by `ModelTensor.name`

    @classmethod
    def combine(cls, decisions: Iterable[Fp32Parts]) -> Fp32Parts:
        """Combine several results into one.

        If several keep a module, the first one gives the reason. If several keep a single tensor, the last one does: it
        names the tensor most specifically (the innermost model's class, or the caller).
        """
        parts = cls()
        for decision in decisions:
            parts.modules |= {name: why for name, why in decision.modules.items() if name not in parts.modules}
            parts.tensors |= decision.tensors
        return parts

    def outermost(self, name: str) -> str | None:
        """The outermost kept module that a module lies in, itself included; None if it is not kept."""
        return outermost(name, self.modules)


def outermost(name: str, modules: Iterable[str]) -> str | None:
    """The outermost of `modules` that the module called `name` lies in, itself included; None if there is none."""
    parts = name.split(".")
    above = ("", *(".".join(parts[:depth]) for depth in range(1, len(parts) + 1)))
    return next((module for module in above if module in modules), None)


def keep_tied_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Add to `parts` every tensor of a kept module, and every other leaf module that owns such a tensor: tied weights.

    A module computes in one dtype, so such an owner is kept as a whole, with its other tensors. Those may be tied in
    turn, so this is repeated until nothing is added.
    """
    kept_before = -1
    while kept_before != len(parts.modules):
        kept_before = len(parts.modules)
        for tensor in tree.tensors:
            kept_owners = (owner.name for owner in tensor.owners if parts.outermost(owner.module) is not None)
            kept_owner = next(kept_owners, None)
            if kept_owner is not None:
                parts.tensors.setdefault(tensor.name, Reason("tied", f"tied to {kept_owner}"))
            if tensor.name not in parts.tensors or not tensor.is_shared:
                continue
            for owner in tensor.owners:
                if not tree.modules[owner.module]._modules and parts.outermost(owner.module) is None:
                    other = kept_owner or next(o.name for o in tensor.owners if o.name != owner.name)
                    parts.modules[owner.module] = Reason("tied", f"tied to {other}")
