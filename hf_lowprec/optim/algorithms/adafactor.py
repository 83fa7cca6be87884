"""Adafactor (Shazeer and Stern, arXiv:1804.04235, Alg. 4): second moments as means over rows and columns."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import Formula, ParamGroup, Step, Values
from hf_lowprec.optim.arguments import Argument, Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State, sqrt_rn
from hf_lowprec.rounding.fp32_math import SMALLEST_NORMAL


class Adafactor(LowPrecisionOptimizer):
    """`torch.optim.Adafactor` for weights stored in BF16: a second moment in one number per row and column.

    It has the arguments of torch's Adafactor, and the options of transformers' Adafactor as keywords. In parameters
    with more than two dimensions, the last two are the rows and columns, as in both libraries.

    States: for parameters with two or more dimensions, `row_var` and `col_var`, always in FP32, in the parameter's
    shape but with one column or one row; for others, `variance`, in BF16 by default; with `beta1`, `exp_avg`, in BF16
    by default; `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an
    int64 scalar.

    Bytes per element of a large matrix, gradient included: 6 with `kahan` and `split`, 4 with the other modes; 2 more
    with `beta1`. FP32 parameters take 8.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor. It is the largest relative step size with `relative_step`.
        beta2_decay: exponent of the decay rate `β₂ = 1 - tᵏ` in step `t`, at most 0.
        eps: two lower bounds. The first is for the root of the second moment, and for the mean of the means over rows;
            it may be None, which stands for 2⁻²³, as in torch for FP32. The second is for the RMS of a weight, with
            `scale_parameter`.
        d: the RMS to which a parameter's update is clipped, before it is multiplied by the learning rate.
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·weight_decay`, as in torch. In transformers'
            Adafactor, the decay is also multiplied by the relative step size and, with `scale_parameter`, by the RMS of
            the parameter.
        beta1: decay rate of a momentum of the updates, in [0, 1); with None, there is no momentum.
        relative_step: use the learning rate `min(lr, 1/√t)`.
        scale_parameter: multiply the learning rate by the RMS of the parameter, at least `eps[1]`.
        maximize: maximize the objective instead of minimizing it.
        square_eps: number added to the squares of gradients: ε₁ in the paper, and `eps[0]` in transformers.

    An `optim=` string turns off `relative_step` and `scale_parameter` and sets `eps=(0.0, 1e-3)` and
    `square_eps=1e-30`, so that it agrees with Trainer's `optim="adafactor"`.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    arguments: ClassVar = {
        "beta2_decay": Argument(float, le=0),
        "square_eps": Argument(float, ge=0),
        "d": Argument(float, ge=1),
        "beta1": Argument(float, ge=0, lt=1),
    }
    named_defaults: ClassVar[dict[str, Any]] = {
        "eps": (0.0, 1e-3),
        "relative_step": False,
        "scale_parameter": False,
        "square_eps": 1e-30,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        relative_step: bool = True,
        scale_parameter: bool = True,
        maximize: bool = False,
        square_eps: float = 0.0,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the means over rows and columns, or the second moment of a vector; and the momentum."""
        variance = State("variance", role=1, factored=("row_var", "col_var"))
        return (variance,) if group["beta1"] is None else (variance, State("exp_avg", role=2))

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return whether updates have a momentum, and whether step sizes are multiplied by the parameter's RMS."""
        return {"momentum": group["beta1"] is not None, "scale_parameter": bool(group["scale_parameter"])}

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return `β₂ = 1 - tᵏ` and the step size, `min(lr, 1/√t)` with `relative_step`. `step` may be a tensor."""
        least = 2.0**-23 if group["eps"][0] is None else max(group["eps"][0], SMALLEST_NORMAL)
        gain2, relative, beta1 = step ** group["beta2_decay"], step**-0.5, group["beta1"] or 0.0
        rate = lr + 0 * relative  # as a tensor: a product of bools and a number would have torch's default dtype
        limited = (lr < relative) * rate + (lr >= relative) * relative if group["relative_step"] else lr
        return {
            "beta2": 1 - gain2,
            "gain2": gain2,
            "square_eps": group["square_eps"],
            "least": least,
            "min_weight": group["eps"][1],
            "step_size": limited,
            "inverse_d": 1 / group["d"],
            "decay": lr * group["weight_decay"],
            "beta1": beta1,
            "gain1": 1 - beta1,
            **self.feedback(group, 1.0),
        }

    def momentum_decay(self, group: ParamGroup) -> float:
        """Return `beta1`."""
        return group["beta1"] or 0.0

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values, **options: bool) -> dict[str, Tensor]:
        """`m' = m - e·(1-β1)/β1`, where `m` is the momentum of updates."""
        return {"exp_avg": state.exp_avg - error * scalars.feedback}

    def tensor_means(self, group: ParamGroup) -> dict[str, Formula]:
        """Return the mean squares of the normalized gradient and, with `scale_parameter`, of the weights."""
        scaled = {"weight_square": Adafactor.weight_square} if group["scale_parameter"] else {}
        return {"normalized_square": Adafactor.normalized_square, **scaled}

    @staticmethod
    def averaged_square(weight: Tensor, grad: Tensor, state: Values, scalars: Values, **options: bool) -> Tensor:
        """`g²`, plus `square_eps`."""
        return _square(grad, scalars)

    @staticmethod
    def normalized_square(weight: Tensor, grad: Tensor, state: Values, scalars: Values, **options: bool) -> Tensor:
        """`(g / max(√v, ε₁))²`."""
        normalized = _normalized(grad, state, scalars)
        return normalized * normalized

    @staticmethod
    def weight_square(weight: Tensor, grad: Tensor, state: Values, scalars: Values, **options: bool) -> Tensor:
        """`w²`."""
        return weight * weight

    @staticmethod
    def update(
        weight: Tensor, grad: Tensor, state: Values, scalars: Values, momentum: bool, scale_parameter: bool
    ) -> Step:
        """`u = -(α·n / max(1, RMS(n)/d) + lr·wd·w)`, `n = g / max(√v, ε₁)`, `α` the step size, or its momentum."""
        states = {} if hasattr(state, "row_factor") else {"variance": _second_moment(grad, state, scalars)}
        clipped = sqrt_rn(scalars.normalized_square) * scalars.inverse_d
        step_size = scalars.step_size / torch.where(clipped > 1.0, clipped, 1.0)
        if scale_parameter:
            scale = sqrt_rn(scalars.weight_square)
            step_size = step_size * torch.where(scale > scalars.min_weight, scale, scalars.min_weight)
        change = _normalized(grad, state, scalars) * step_size
        if momentum:
            change = state.exp_avg * scalars.beta1 + change * scalars.gain1
            states["exp_avg"] = change
        return -(change + weight * scalars.decay), states


def _square(grad: Tensor, scalars: Values) -> Tensor:
    return grad * grad + scalars.square_eps


def _second_moment(grad: Tensor, state: Values, scalars: Values) -> Tensor:
    return state.variance * scalars.beta2 + _square(grad, scalars) * scalars.gain2


def _normalized(grad: Tensor, state: Values, scalars: Values) -> Tensor:
    """Return the gradient divided by the root of its second moment, which is at least `least`."""
    is_factored = hasattr(state, "row_factor")
    root = state.row_factor * state.column_factor if is_factored else sqrt_rn(_second_moment(grad, state, scalars))
    return grad / torch.where(root < scalars.least, scalars.least, root)
