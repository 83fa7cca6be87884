"""One parameter of a fused group: its tensors, and where the optimizer keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.step.kernel_spec import COLUMN_FACTOR, ORTHOGONALIZED, ROW_FACTOR


@dataclass
class ParamEntry:
    """One parameter's tensors and settings, as a step needs them.

    Attributes:
        number: the parameter's number in the random stream: its position in the optimizer, counted from the group's
            `first_parameter`.
        group: its parameter group.
        optimizer_state: its entry in `optimizer.state`.
        param: the parameter as the user has it, which may be a DTensor.
        weight: this rank's part of it, contiguous.
        states: this rank's part of each state of the parameter's shape, contiguous, by name and in the order of the
            spec.
        means: this rank's part of the states that are means over rows or columns, flat, by name.
        grad: this rank's part of the gradient, contiguous; None outside of a step, so that it is not kept alive.
        orthogonalized: the BF16 matrix that the algorithm made of the momentum, of the shape of `weight`; None except
            from when it is computed until the entry is stepped, and for other algorithms.
        factors: the row and column factors, FP32 and flat; None except during a step, and for other algorithms.
    """

    number: int
    group: ParamGroup
    optimizer_state: dict[str, Any]
    param: Tensor
    weight: Tensor
    states: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None
    orthogonalized: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in the order of `KernelSpec.tensors`; some inputs only once they are computed."""
        assert self.grad is not None, "outside of a step there is no gradient"
        inputs = {"grad": self.grad} | ({} if self.orthogonalized is None else {ORTHOGONALIZED: self.orthogonalized})
        factors = {} if self.factors is None else dict(zip((ROW_FACTOR, COLUMN_FACTOR), self.factors, strict=True))
        return {"param": self.weight, **inputs, **factors, **self.states}
