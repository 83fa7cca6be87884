"""The base class of Adam, AdamW and RAdam: bias-corrected first and second moments of the gradients."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.arguments import check_betas, check_range
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State, sqrt_rn


class TwoMoments(LowPrecisionOptimizer):
    """Base of the algorithms that divide the first moment by the square root of the second (Adam, arXiv:1412.6980).

    Subclasses define `options`: `amsgrad`, whether the maximum of all second moments so far is used (arXiv:1904.09237),
    and `decoupled`, whether the weight decay is decoupled (arXiv:1711.05101) or an L2 penalty added to the gradient.
    """

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        check_betas(group["betas"])
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """The two moments, and with `amsgrad` the maximum of the second."""
        moments = (State("exp_avg", role=2), State("exp_avg_sq", role=1, nonnegative=True))
        return (
            (*moments, State("max_exp_avg_sq", role=3, averages=False, nonnegative=True))
            if self.options(group)["amsgrad"]
            else moments
        )

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Decay rates, step size and bias corrections, arranged so that an element needs one division and one root."""
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1,
            "gain1": 1 - beta1,
            "beta2": beta2,
            "gain2": 1 - beta2,
            "step_size": lr / (1 - beta1**step),
            "root_correction": (1 - beta2**step) ** -0.5,
            "eps": group["eps"],
            "decay": (lr if self.options(group)["decoupled"] else 1) * group["weight_decay"],
        }

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: SimpleNamespace, scalars: SimpleNamespace, amsgrad: bool, decoupled: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`u = -(a·m / (√v·b + ε) + d·w)`, with `a = lr/(1-β1ᵗ)`, `b = 1/√(1-β2ᵗ)`, `d = lr·wd`.

        If the decay is not decoupled, the gradient is `g + wd·w` and the term `d·w` is omitted.
        """
        if not decoupled:
            grad = grad + weight * scalars.decay
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_sq = state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        second = exp_avg_sq
        if amsgrad:
            second = torch.where(exp_avg_sq > state.max_exp_avg_sq, exp_avg_sq, state.max_exp_avg_sq)
            moments["max_exp_avg_sq"] = second
        denominator = sqrt_rn(second) * scalars.root_correction + scalars.eps
        change = exp_avg * scalars.step_size / denominator
        return -(change + weight * scalars.decay if decoupled else change), moments
