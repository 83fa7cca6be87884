"""RAdam (Liu et al., arXiv:1908.03265, Alg. 2), in the form of `torch.optim.RAdam`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.algorithms.adam import Adam
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer

_MIN_SMA_LENGTH = 5.0
"""Length ρ of the simple moving average (SMA) above which the variance of the second moment is tractable."""


class RAdam(Adam):
    """`torch.optim.RAdam` for weights stored in BF16: Adam with a built-in warm-up.

    The first steps (five at β2 = 0.999) use only the first moment. After that, the step size grows to Adam's.

    States: `exp_avg`, `exp_avg_sq`, in the parameter's shape and in BF16 by default; `compensation` (BF16) with
    `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with `kahan` and `split`, 8 with the other modes. FP32 parameters take
    16.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1). For β2 ≤ 2/3 the second moment is never used.
        eps: added to the square root of the second moment, before the bias correction.
        weight_decay: coefficient of the L2 penalty, added to the gradient.
        decoupled_weight_decay: use AdamW's decoupled weight decay instead of the L2 penalty.
        maximize: maximize the objective instead of minimizing it.

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
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        LowPrecisionOptimizer.__init__(self, params, locals(), **shared)

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return the options of Adam: `decoupled` for decoupled weight decay, and never `amsgrad`."""
        return {"amsgrad": False, "decoupled": bool(group["decoupled_weight_decay"])}

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return Adam's scalars, with the step size multiplied by `r = √((ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ))` if `ρ > 5`.

        Otherwise, the denominator is 1. Factors of 0 and 1 select the case, because `step` may be a tensor.
        """
        adam = super().scalars(group, lr, step)
        beta1, beta2 = group["betas"]
        rectified, rectification = _rectification(beta2, step)
        unrectified = 1 - rectified
        root_correction = rectified * adam["root_correction"]
        if "feedback" in adam:
            # No feedback in the first steps: later steps, with other denominators, would multiply it.
            _, coming = _rectification(beta2, step + 1 / (1 - beta1))
            adam["feedback"] = rectified * adam["feedback"] / coming
        return {
            **adam,
            "step_size": adam["step_size"] * (rectified * rectification + unrectified),
            "root_correction": root_correction,
            "eps": root_correction * group["eps"] + unrectified,
        }


def _rectification(beta2: float, step: Any) -> tuple[Any, Any]:
    """Return 1 if `step` is rectified, else 0; and the factor of its step size."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
    rectified = (rho > _MIN_SMA_LENGTH) * 1.0
    rho_inf, rho = max(rho_inf, _MIN_SMA_LENGTH), rectified * rho + (1 - rectified) * _MIN_SMA_LENGTH
    return rectified, ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
