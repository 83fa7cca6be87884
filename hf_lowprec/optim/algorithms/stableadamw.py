"""StableAdamW (Wortsman et al., arXiv:2304.13013, Alg. 2): AdamW with the update clipping of Adafactor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import Formula, ParamGroup, Step, Values, coming_bias_correction
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State, sqrt_rn
from hf_lowprec.rounding.fp32_math import SMALLEST_NORMAL


class StableAdamW(LowPrecisionOptimizer):
    """AdamW with per-tensor update clipping: it takes smaller steps where gradients outgrow their second moment.

    No gradient clipping is needed.

    States: `exp_avg`, `exp_avg_sq`, in the parameter's shape and in BF16 by default; `compensation` (BF16) with
    `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with `kahan` and `split`, 8 with the other modes. FP32 parameters take
    16.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the square root of the second moment; its square is the lower bound of the second moment in the
            ratio `g² / v`.
        weight_decay: decoupled decay, multiplied by the learning rate; reduced when the step is clipped.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the two moments."""
        return State("exp_avg", role=2), State("exp_avg_sq", role=1, nonnegative=True)

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return decay rates with the bias correction: `β̂ = β·(1-βᵗ⁻¹)/(1-βᵗ)`, so that `1-β̂ = (1-β)/(1-βᵗ)`."""
        beta1, beta2 = group["betas"]
        return {
            "beta1": beta1 * (1 - beta1 ** (step - 1)) / (1 - beta1**step),
            "gain1": (1 - beta1) / (1 - beta1**step),
            "beta2": beta2 * (1 - beta2 ** (step - 1)) / (1 - beta2**step),
            "gain2": (1 - beta2) / (1 - beta2**step),
            "lr": lr,
            "eps": group["eps"],
            # 0/0 would make the mean NaN and undo the clipping.
            "min_exp_avg_sq": max(group["eps"] ** 2, SMALLEST_NORMAL),
            "weight_decay": group["weight_decay"],
            **self.feedback(group, lr, (1 - beta1**step) * coming_bias_correction(beta1, step)),
        }

    def tensor_means(self, group: ParamGroup) -> dict[str, Formula]:
        """Return the mean of `g² / max(v, ε²)`. Its root, the RMS in `update`, is about 1 while gradients match `v`."""
        return {"mean_square": StableAdamW.normalized_square}

    @staticmethod
    def normalized_square(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Tensor:
        """`g² / max(v, ε²)`."""
        exp_avg_sq = _second_moment(grad, state, scalars)
        return grad * grad / torch.where(exp_avg_sq > scalars.min_exp_avg_sq, exp_avg_sq, scalars.min_exp_avg_sq)

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Step:
        """`u = -η·(m / (√v + ε) + wd·w)`, with `η = lr / max(1, RMS)` and `RMS = √mean(g² / max(v, ε²))`."""
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_sq = _second_moment(grad, state, scalars)
        step_size = scalars.lr / _divisor(scalars)
        change = exp_avg / (sqrt_rn(exp_avg_sq) + scalars.eps) + weight * scalars.weight_decay
        return -(change * step_size), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values) -> dict[str, Tensor]:
        """`m' = m - e·(√v + ε)·(1-β1)/(η·β1)`."""
        owed = error * (sqrt_rn(state.exp_avg_sq) + scalars.eps) * _divisor(scalars)
        return {"exp_avg": state.exp_avg - owed * scalars.feedback}


def _divisor(scalars: Values) -> Tensor:
    """Return `max(1, RMS)`, by which the learning rate is divided."""
    rms = sqrt_rn(scalars.mean_square)
    return torch.where(rms > 1.0, rms, 1.0)


def _second_moment(grad: Tensor, state: Values, scalars: Values) -> Tensor:
    return state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
