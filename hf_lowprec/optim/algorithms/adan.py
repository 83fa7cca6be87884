"""Adan (Xie et al., arXiv:2208.06677, Alg. 1 without restarts), with the bias corrections of its authors' code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.shared_keywords import Shared
from hf_lowprec.optim.validation import check_betas, check_range
from hf_lowprec.rounding import State, sqrt_rn

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adan(LowPrecisionOptimizer):
    """Adan for weights stored in BF16: Nesterov momentum estimated from differences of successive gradients.

    States: `exp_avg`, `exp_avg_diff`, `exp_avg_sq` and `previous_grad`, of the parameter's shape, BF16 by default;
    `compensation` (BF16) with `rounding="kahan"`; `step`, an int64 scalar. A BF16
    `previous_grad` holds a BF16 gradient exactly, unless it was clipped inside the step.

    Bytes per parameter, gradient included: 14 with Kahan summation, 12 with the other modes. FP32 parameters take
    24.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the moments of the gradient, of its difference and of the square, each in [0, 1); the
            paper's are one minus these.
        eps: added to the root of the bias-corrected second moment.
        weight_decay: decoupled decay, by `1 / (1 + lr·weight_decay)` after the step.
        maximize: ascend instead of descend.
        no_prox: decay as AdamW does, by `1 - lr·weight_decay` before the step.

    `rounding`, `state_dtype`, `seed` and the other keywords that every optimizer takes, and the errors raised, are
    those of `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        no_prox: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "no_prox": no_prox,
            },
            **shared,
        )

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        check_betas(group["betas"])
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """The three moments and the previous gradient."""
        moments = (State("exp_avg", 2), State("exp_avg_diff", 3), State("exp_avg_sq", 1))
        return (*moments, State("previous_grad", 4, averages=False))

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """The proximal decay `(w - s) / (1 + lr·wd)` is `w - (s + lr·wd·w) / (1 + lr·wd)`: a factor of every term.

        Before the first step there was no gradient, so there is no difference.
        """
        beta1, beta2, beta3 = group["betas"]
        decay = lr * group["weight_decay"]
        shrink = 1 if group["no_prox"] else 1 / (1 + decay)
        return {
            "beta1": beta1,
            "gain1": 1 - beta1,
            "beta2": beta2,
            "gain2": 1 - beta2,
            "beta3": beta3,
            "gain3": 1 - beta3,
            "differs": 1 - 0.0 ** (step - 1),
            "step_size": lr / (1 - beta1**step) * shrink,
            "step_size_diff": lr * beta2 / (1 - beta2**step) * shrink,
            "root_correction": (1 - beta3**step) ** -0.5,
            "eps": group["eps"],
            "decay": decay * shrink,
        }

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Any, scalars: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """`u = -((a·m + c·v) / (√n·b + ε) + d·w)`: `m` of `g`, `v` of `δ = g - g₋₁`, `n` of `(g + β2·δ)²`.

        `s = 1/(1 + lr·wd)`, `a = s·lr/(1-β1ᵗ)`, `c = s·lr·β2/(1-β2ᵗ)`, `b = 1/√(1-β3ᵗ)`, `d = s·lr·wd`.
        """
        diff = (grad - state.previous_grad) * scalars.differs
        ahead = grad + diff * scalars.beta2
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_diff = state.exp_avg_diff * scalars.beta2 + diff * scalars.gain2
        exp_avg_sq = state.exp_avg_sq * scalars.beta3 + ahead * ahead * scalars.gain3
        denominator = sqrt_rn(exp_avg_sq) * scalars.root_correction + scalars.eps
        change = (exp_avg * scalars.step_size + exp_avg_diff * scalars.step_size_diff) / denominator
        return -(change + weight * scalars.decay), {
            "exp_avg": exp_avg,
            "exp_avg_diff": exp_avg_diff,
            "exp_avg_sq": exp_avg_sq,
            "previous_grad": grad,
        }
