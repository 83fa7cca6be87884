"""The formula of Adam, AdamW and RAdam: two moments, corrected for their start at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.validation import check_betas, check_range
from hf_lowprec.rounding import State, sqrt_rn


class TwoMoments(LowPrecisionOptimizer):
    """Base of the algorithms that divide the mean of the gradients by the root of the mean of their squares.

    An algorithm gives `options`: `amsgrad`, whether the largest second moment so far is used, and `decoupled`, whether
    the weight decays by itself (arXiv:1711.05101) or as part of the gradient, an L2 penalty.
    """

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        check_betas(group["betas"])
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """The moments, and with `amsgrad` the largest second moment so far."""
        moments = (State("exp_avg", 2), State("exp_avg_sq", 1))
        return (*moments, State("max_exp_avg_sq", 3, averages=False)) if self.options(group)["amsgrad"] else moments

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Decay rates, step size and bias corrections, so that an element needs one division and one root."""
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
        weight: Tensor, grad: Tensor, state: Any, scalars: Any, amsgrad: bool, decoupled: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`u = -(a·m / (√v·b + ε) + d·w)`, with `a = lr/(1-β1ᵗ)`, `b = 1/√(1-β2ᵗ)`, `d = lr·wd`.

        Not decoupled, `grad + wd·w` takes the place of the gradient and there is no `d·w`.
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
