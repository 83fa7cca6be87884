"""The result of the rules: the modules and tensors that stay in FP32, each with a reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Rule = Literal["quantized", "listed class", "norm", "rotary", "loss", "model class", "keep_fp32", "tied"]


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
