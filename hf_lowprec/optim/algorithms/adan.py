"""Adan (Xie et al., arXiv:2208.06677, Alg. 1 without restarts), with the bias corrections of the authors' code."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values, coming_bias_correction
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State, sqrt_rn


class Adan(LowPrecisionOptimizer):
    """Adan for weights stored in BF16: Nesterov momentum estimated from differences of successive gradients.

    States: `exp_avg`, `exp_avg_diff`, `exp_avg_sq` and `previous_grad`, in the parameter's shape and in BF16 by
    default; `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an
    int64 scalar. `previous_grad` holds a BF16 gradient exactly, unless the gradient is clipped inside the step.

    Bytes per parameter, gradient included: 14 with `kahan` and `split`, 12 with the other modes. FP32 parameters take
    24.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the moving averages of the gradient, of its difference and of the square, each in [0, 1).
            The paper's β are one minus these.
        eps: added to the square root of the bias-corrected second moment.
        weight_decay: decoupled decay; multiplies the weights by `1 / (1 + lr·weight_decay)` after the step.
        maximize: maximize the objective instead of minimizing it.
        no_prox: multiply the weights by `1 - lr·weight_decay` before the step, as AdamW does, instead of by
            `1 / (1 + lr·weight_decay)` after it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        no_prox: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the three moments and the previous gradient."""
        moments = State("exp_avg", role=2), State("exp_avg_diff", role=3)
        square = State("exp_avg_sq", role=1, nonnegative=True)
        return (*moments, square, State("previous_grad", role=4, accumulates=False))

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return decay rates, step sizes and bias corrections.

        The proximal decay `(w - s) / (1 + lr·wd)` equals `w - (s + lr·wd·w) / (1 + lr·wd)`, so each term of the update
        has the factor `shrink`. `diff_scale` is 0 in the first step, which has no previous gradient, and 1 after it.
        """
        beta1, beta2, beta3 = group["betas"]
        decay = lr * group["weight_decay"]
        shrink = 1 if group["no_prox"] else 1 / (1 + decay)
        rates = {"beta1": beta1, "gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2}
        return {
            **rates,
            "beta3": beta3,
            "gain3": 1 - beta3,
            "diff_scale": 1 - 0.0 ** (step - 1),
            "step_size": lr / (1 - beta1**step) * shrink,
            "step_size_diff": lr * beta2 / (1 - beta2**step) * shrink,
            "root_correction": (1 - beta3**step) ** -0.5,
            "eps": group["eps"],
            "decay": decay * shrink,
            **self.feedback(group, lr, shrink * coming_bias_correction(beta1, step)),
        }

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Step:
        """`u = -((a·m + c·v) / (√n·b + ε) + d·w)`; `m`, `v`, `n` are the moments of `g`, `δ = g - g₋₁`, `(g + β2·δ)²`.

        `s = 1/(1 + lr·wd)`, `a = s·lr/(1-β1ᵗ)`, `c = s·lr·β2/(1-β2ᵗ)`, `b = 1/√(1-β3ᵗ)`, `d = s·lr·wd`.
        """
        diff = (grad - state.previous_grad) * scalars.diff_scale
        nesterov_grad = grad + diff * scalars.beta2
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_diff = state.exp_avg_diff * scalars.beta2 + diff * scalars.gain2
        exp_avg_sq = state.exp_avg_sq * scalars.beta3 + nesterov_grad * nesterov_grad * scalars.gain3
        change = exp_avg * scalars.step_size + exp_avg_diff * scalars.step_size_diff
        change = change / _denominator(exp_avg_sq, scalars)
        return -(change + weight * scalars.decay), {
            "exp_avg": exp_avg,
            "exp_avg_diff": exp_avg_diff,
            "exp_avg_sq": exp_avg_sq,
            "previous_grad": grad,
        }

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values) -> dict[str, Tensor]:
        """`m' = m - e·(√n·b + ε)·(1-β1)/(a·β1)`."""
        return {"exp_avg": state.exp_avg - error * _denominator(state.exp_avg_sq, scalars) * scalars.feedback}


def _denominator(second: Tensor, scalars: Values) -> Tensor:
    return sqrt_rn(second) * scalars.root_correction + scalars.eps
