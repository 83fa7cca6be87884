"""AdamW (Loshchilov & Hutter, arXiv:1711.05101, Alg. 2), with the decay inside the one rounded update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.base import LowPrecisionOptimizer
from hf_lowprec.optim.signature import Shared
from hf_lowprec.optim.validation import check_range
from hf_lowprec.optim.work import Group
from hf_lowprec.rounding import State, sqrt_rn

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` for weights stored in BF16.

    States: `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq` with `amsgrad`), of the parameter's shape, BF16 by default;
    `compensation` (BF16) with `rounding="kahan"`; `step`, an FP32 scalar.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the bias-corrected second moment.
        weight_decay: decoupled decay, per unit of learning rate.
        amsgrad: keep the maximum of the second moment.
        maximize: ascend instead of descend.

    The other arguments, and the errors raised, are those of `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
            },
            **shared,
        )

    def check_hyperparameters(self, group: Group) -> None:
        """Raise ValueError if a hyperparameter is out of range."""
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(f"betas={group['betas']!r} is invalid; it must be two numbers, as (0.9, 0.999)")
        for k, beta in enumerate(group["betas"]):
            check_range(f"betas[{k}]", beta, 0.0, 1.0)
        check_range("eps", group["eps"], 0.0)
        check_range("weight_decay", group["weight_decay"], 0.0)

    def states(self, group: Group) -> tuple[State, ...]:
        """The moments, and with `amsgrad` the largest second moment so far."""
        moments = (State("exp_avg", 2), State("exp_avg_sq", 1))
        return (*moments, State("max_exp_avg_sq", 3, averages=False)) if group["amsgrad"] else moments

    def options(self, group: Group) -> dict[str, bool]:
        """Whether the maximum of the second moment is used."""
        return {"amsgrad": bool(group["amsgrad"])}

    def scalars(self, group: Group, lr: float, step: int) -> dict[str, float]:
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
            "decay": lr * group["weight_decay"],
        }

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: Any, scalars: Any, amsgrad: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`u = -(a·m / (√v·b + ε) + d·w)`, with `a = lr/(1-β1ᵗ)`, `b = 1/√(1-β2ᵗ)`, `d = lr·wd`."""
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_sq = state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        second = exp_avg_sq
        if amsgrad:
            second = torch.where(exp_avg_sq > state.max_exp_avg_sq, exp_avg_sq, state.max_exp_avg_sq)
            moments["max_exp_avg_sq"] = second
        denominator = sqrt_rn(second) * scalars.root_correction + scalars.eps
        return -(exp_avg * scalars.step_size / denominator + weight * scalars.decay), moments
