"""StableAdamW (Wortsman et al., arXiv:2304.13013, Alg. 2): AdamW with the update clipping of Adafactor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.shared_keywords import Shared
from hf_lowprec.optim.validation import check_betas, check_range
from hf_lowprec.rounding import State, sqrt_rn

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StableAdamW(LowPrecisionOptimizer):
    """AdamW with update clipping per tensor: smaller steps where gradients outgrow their second moment.

    It needs no gradient clipping.

    States: `exp_avg`, `exp_avg_sq`, of the parameter's shape, BF16 by default; `compensation` (BF16) with
    `rounding="kahan"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with Kahan summation, 8 with the other modes. FP32 parameters take
    16.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, and its least value where gradients are compared with it.
        weight_decay: decoupled decay, per unit of learning rate; where the step is clipped, so is the decay.
        maximize: ascend instead of descend.

    `rounding`, `state_dtype`, `seed` and the other keywords that every optimizer takes, and the errors raised, are
    those of `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **shared)

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        check_betas(group["betas"])
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """The moments."""
        return State("exp_avg", 2), State("exp_avg_sq", 1)

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """The bias correction is in the decay rates: `β̂ = β·(1-βᵗ⁻¹)/(1-βᵗ)`, so that `1-β̂ = (1-β)/(1-βᵗ)`."""
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1 * (1 - beta1 ** (step - 1)) / (1 - beta1**step),
            "gain1": (1 - beta1) / (1 - beta1**step),
            "beta2": beta2 * (1 - beta2 ** (step - 1)) / (1 - beta2**step),
            "gain2": (1 - beta2) / (1 - beta2**step),
            "lr": lr,
            "eps": group["eps"],
            "least": max(group["eps"] ** 2, 2.0**-126),  # FP32's least normal number: 0/0 would undo the clipping
            "weight_decay": group["weight_decay"],
        }

    @staticmethod
    def tensor_mean(weight: Tensor, grad: Tensor, state: Any, scalars: Any) -> Tensor:
        """`g² / max(v, ε²)`, whose root mean is 1 as long as gradients are what the second moment expects."""
        exp_avg_sq = _second_moment(grad, state, scalars)
        return grad * grad / torch.where(exp_avg_sq > scalars.least, exp_avg_sq, scalars.least)

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Any, scalars: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """`u = -η·(m / (√v + ε) + wd·w)`, with `η = lr / max(1, RMS)`."""
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_sq = _second_moment(grad, state, scalars)
        excess = sqrt_rn(scalars.tensor_mean)
        step_size = scalars.lr / torch.where(excess > 1.0, excess, 1.0)
        change = exp_avg / (sqrt_rn(exp_avg_sq) + scalars.eps) + weight * scalars.weight_decay
        return -(change * step_size), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _second_moment(grad: Tensor, state: Any, scalars: Any) -> Tensor:
    return state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
