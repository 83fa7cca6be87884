"""Adam (Kingma & Ba, arXiv:1412.6980, Alg. 1), with AMSGrad (Reddi et al., arXiv:1904.09237, Alg. 2) as an option."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values, coming_bias_correction
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State, sqrt_rn
from hf_lowprec.rounding.fp32_math import SMALLEST_NORMAL


class Adam(LowPrecisionOptimizer):
    """`torch.optim.Adam` for weights stored in BF16. Its `weight_decay` is an L2 penalty; `AdamW` decouples it.

    States: `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq` with `amsgrad`), in the parameter's shape and in BF16 by
    default; `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an
    int64 scalar.

    Bytes per parameter, gradient included: 10 with `kahan` and `split`, 8 with the other modes, plus 2 with `amsgrad`.
    FP32 parameters take 16, or 20 with `amsgrad`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the square root of the bias-corrected second moment.
        weight_decay: coefficient of the L2 penalty, added to the gradient.
        amsgrad: use the maximum of all past second moments.
        maximize: maximize the objective instead of minimizing it.
        decoupled_weight_decay: use AdamW's decoupled weight decay instead of the L2 penalty.
        factored: keep the second moment of matrices as means over rows and columns, as described in `AdamW`.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        factored: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return `amsgrad` (use the maximum of the second moment) and `decoupled` (decoupled weight decay)."""
        return {"amsgrad": bool(group["amsgrad"]), "decoupled": bool(group["decoupled_weight_decay"])}

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the two moments, and with `amsgrad` the maximum of the second."""
        means = ("exp_avg_sq_row", "exp_avg_sq_col") if group.get("factored") else None
        exp_avg_sq = State("exp_avg_sq", role=1, nonnegative=True, factored=means, if_smaller=True)
        moments = State("exp_avg", role=2), exp_avg_sq
        if not self.options(group)["amsgrad"]:
            return moments
        return (*moments, State("max_exp_avg_sq", role=3, accumulates=False, nonnegative=True))

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if the maximum of a factored second moment is requested."""
        if group.get("factored") and self.options(group)["amsgrad"]:
            raise ValueError(
                "amsgrad=True needs the second moment of each element, which factored=True does not keep; remove one"
            )

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return decay rates, step size and bias corrections, such that an element needs one division and one root."""
        beta1, beta2 = group["betas"]
        rates = {"beta1": beta1, "gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2}
        return {
            **rates,
            "step_size": lr / (1 - beta1**step),
            "root_correction": (1 - beta2**step) ** -0.5,
            "eps": group["eps"],
            "decay": (lr if self.options(group)["decoupled"] else 1) * group["weight_decay"],
            **({"least": SMALLEST_NORMAL} if group.get("factored") else {}),
            **self.feedback(group, lr, coming_bias_correction(beta1, step)),
        }

    @staticmethod
    def averaged_square(
        weight: Tensor, grad: Tensor, state: Values, scalars: Values, decoupled: bool, **options: bool
    ) -> Tensor:
        """`g²`, where `g` contains the L2 penalty."""
        grad = _with_penalty(weight, grad, scalars, decoupled)
        return grad * grad

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values, amsgrad: bool, decoupled: bool) -> Step:
        """`u = -(a·m / (√v·b + ε) + d·w)`, with `a = lr/(1-β1ᵗ)`, `b = 1/√(1-β2ᵗ)`, `d = lr·wd`.

        If the decay is not decoupled, `d = wd`, the gradient is `g + d·w`, and the term `d·w` is omitted.
        """
        grad = _with_penalty(weight, grad, scalars, decoupled)
        new = {"exp_avg": state.exp_avg * scalars.beta1 + grad * scalars.gain1}
        if not hasattr(state, "row_factor"):
            new["exp_avg_sq"] = state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
        if amsgrad:
            second, largest = new["exp_avg_sq"], state.max_exp_avg_sq
            new["max_exp_avg_sq"] = torch.where(second > largest, second, largest)
        change = new["exp_avg"] * scalars.step_size / _denominator({**vars(state), **new}, scalars, amsgrad)
        return -(change + weight * scalars.decay if decoupled else change), new

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values, amsgrad: bool, **options: bool) -> dict[str, Tensor]:
        """`m' = m - e·(√v·b + ε)·(1-β1)/(a·β1)`."""
        return {"exp_avg": state.exp_avg - error * _denominator(vars(state), scalars, amsgrad) * scalars.feedback}


def _with_penalty(weight: Tensor, grad: Tensor, scalars: Values, decoupled: bool) -> Tensor:
    return grad if decoupled else grad + weight * scalars.decay


def _denominator(state: dict[str, Tensor], scalars: Values, amsgrad: bool) -> Tensor:
    """Return `√v·b + ε` from the new states."""
    if "row_factor" in state:
        root = state["row_factor"] * state["column_factor"]
    else:
        root = sqrt_rn(state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"])
    return root * scalars.root_correction + scalars.eps
