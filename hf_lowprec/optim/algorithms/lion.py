"""Lion (Chen et al., arXiv:2302.06675, Alg. 2): steps by the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State


class Lion(LowPrecisionOptimizer):
    """Lion for weights stored in BF16: updates by the sign of an interpolated momentum, with one moment instead of two.

    Apart from weight decay, every step changes each weight by the learning rate. The authors recommend a
    learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.

    States: `exp_avg`, in the parameter's shape and in BF16 by default; `compensation` (BF16) with `rounding="kahan"`,
    `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 8 with `kahan` and `split`, 6 with the other modes. FP32 parameters take 12.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: weight of the momentum in the interpolation with the gradient, and decay rate of the momentum, each in
            [0, 1).
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·weight_decay`.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the momentum."""
        return (State("exp_avg", role=1),)

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return decay rates and the learning rate; none depends on the step count."""
        beta1, beta2 = group["betas"]
        rates = {"beta1": beta1, "gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2}
        return {**rates, "lr": lr, "decay": lr * group["weight_decay"]}

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Step:
        """`u = -(lr·sign(β1·m + (1-β1)·g) + lr·wd·w); m = β2·m + (1-β2)·g`."""
        interpolated = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg = state.exp_avg * scalars.beta2 + grad * scalars.gain2
        # Zero and NaN pass through: a NaN must reach the weight, where it is noticed.
        sign = torch.where(interpolated > 0, 1.0, torch.where(interpolated < 0, -1.0, interpolated))
        return -(sign * scalars.lr + weight * scalars.decay), {"exp_avg": exp_avg}
