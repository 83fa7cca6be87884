"""Prodigy (Mishchenko and Defazio, arXiv:2306.06101, Alg. 4): Adam with a learning rate that it estimates itself.

The estimate d is a quotient of sums over all parameters. Its numerator contains `p0 - p`, the displacement from the
initial weights, which is a state, instead of a copy of the initial weights: it starts at zero, and BF16 suits it as
well as a moment.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import Formula, ParamGroup, Step, Values, coming_bias_correction
from hf_lowprec.optim.arguments import Argument, Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.rounding import State, sqrt_rn


class Prodigy(LowPrecisionOptimizer):
    """AdamW that estimates its learning rate: set `lr=1`, or a schedule from 1 to 0.

    `optimizer.param_groups[0]["d"]` is the estimate, by which `lr` is multiplied. It never decreases.

    States: `exp_avg`, `exp_avg_sq`, `s` and `p0_minus_p`, in the parameter's shape and in BF16 by default;
    `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.
    The moments are of `d·g`, the gradient times the estimate.

    As in the authors' package, a group at lr 0 adds nothing to the estimate or to its states, and a step in which all
    groups are at lr 0, such as the first of a warm-up, is neither taken nor counted.

    Bytes per parameter, gradient included: 14 with `kahan` and `split`, 12 with the other modes. FP32 parameters take
    24.

    Args:
        params: parameters or parameter groups.
        lr: factor by which the estimate is multiplied, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1). The sums behind d decay by `√betas[1]`.
        eps: added, times d, to the square root of the second moment.
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·d·weight_decay`.
        use_bias_correction: multiply the learning rate by Adam's bias corrections.
        safeguard_warmup: leave `lr` out of the denominator of d. Use it with a warm-up.
        d0: the initial d, above 0.
        d_coef: factor by which every new d is multiplied.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer". A step needs all
    gradients, and waits for two sums from the device: `gradient_release` raises ValueError.
    """

    arguments: ClassVar = {"d0": Argument(float, gt=0), "d_coef": Argument(float, ge=0)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)
        for group in self.param_groups:
            group.update(d=group["d0"], d_numerator=0.0)
        if self.gradient_release:
            raise ValueError("Prodigy sums over all gradients, which gradient_release=True frees early; remove it")

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the moments, the sum of gradients in the denominator of d, and the displacement of the weights."""
        moments = State("exp_avg", role=2), State("exp_avg_sq", role=1, nonnegative=True)
        return (*moments, State("s", role=3), State("p0_minus_p", role=4))

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return decay rates, and factors with d. At lr 0, states do not change: `β⁰ = 1`.

        With `use_bias_correction`, `γ` is multiplied by `√(1-β2ᵗ) / (1-β1ᵗ)`.
        """
        (beta1, beta2), d0 = group["betas"], group["d0"]
        d: Any = self.param_groups[0].get("d", d0)  # missing while the optimizer is built
        active = (lr > 0) * (1 + 0 * lr)  # 1 or 0, of the dtype of `lr`
        corrects = group["use_bias_correction"]
        correction2 = (1 - beta2**step) ** 0.5 if corrects else 1
        rate = d * lr * (correction2 / (1 - beta1**step) if corrects else 1)
        return {
            "active": active,
            "beta1": beta1**active,
            "gain1": d * (1 - beta1) * active,
            "beta2": beta2**active,
            "gain2": d**2 * (1 - beta2) * active,
            "beta3": beta2 ** (0.5 * active),
            "gain3": d / d0 * (d if group["safeguard_warmup"] else rate) * active,
            "gain_of_slope": d / d0 * rate,
            "step_size": rate,
            "eps": d * group["eps"],
            "decay": rate * group["weight_decay"],
            **self.feedback(group, lr, d * correction2 * (coming_bias_correction(beta1, step) if corrects else 1)),
        }

    def tensor_means(self, group: ParamGroup) -> dict[str, Formula]:
        """Return the terms of the two sums whose quotient is the new d."""
        return {"slope": Prodigy.slope, "size": Prodigy.size}

    @staticmethod
    def slope(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Tensor:
        """`d/d0·γ·g·(p0 - p)`."""
        return grad * state.p0_minus_p * scalars.gain_of_slope

    @staticmethod
    def size(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Tensor:
        """`|s|`; zero at lr 0."""
        total = _sum_of_gradients(grad, state, scalars) * scalars.active
        return torch.where(total < 0, -total, total)

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Step:
        """`u = -γ·(m / (√v + d·ε) + wd·p)` with `γ = lr·d`; `m`, `v` are the moments of `d·g`."""
        exp_avg = state.exp_avg * scalars.beta1 + grad * scalars.gain1
        exp_avg_sq = state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
        change = exp_avg * scalars.step_size / (sqrt_rn(exp_avg_sq) + scalars.eps) + weight * scalars.decay
        sums = {"s": _sum_of_gradients(grad, state, scalars), "p0_minus_p": state.p0_minus_p + change}
        return -change, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **sums}

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values) -> dict[str, Tensor]:
        """`m' = m - e·(√v + d·ε)·(1-β1)/(γ·β1)`."""
        owed = error * (sqrt_rn(state.exp_avg_sq) + scalars.eps) * scalars.feedback
        return {"exp_avg": state.exp_avg - owed}

    def run_step(self, plan: StepPlan) -> None:
        """Step the plan's parameters, and estimate the next d. If all sums of gradients are zero, do not step."""
        slope, size, skipped = 0.0, 0.0, False
        for fused_group in (backend_step.fused_group for backend_step in plan.backend_steps):
            assert fused_group.per_param_scalars is not None
            sums = (fused_group.per_param_scalars.double() * fused_group.full_sizes[:, None]).sum(0).tolist()
            slope, size, skipped = slope + sums[0], size + sums[1], skipped or fused_group.skipped
        if size == 0:
            return
        super().run_step(plan)
        if not (size > 0 and math.isfinite(slope)) or skipped:
            return
        first = self.param_groups[0]
        numerator = first["betas"][1] ** 0.5 * first["d_numerator"] + slope
        d = max(first["d"], first["d_coef"] * numerator / size)
        for group in self.param_groups:
            group.update(d=d, d_numerator=numerator)


def _sum_of_gradients(grad: Tensor, state: Values, scalars: Values) -> Tensor:
    return state.s * scalars.beta3 + grad * scalars.gain3
