"""RAdam (Liu et al., arXiv:1908.03265, Alg. 2), in the form of `torch.optim.RAdam`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.algorithms._two_moments import TwoMoments
from hf_lowprec.optim.shared_keywords import Shared

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SHORTEST = 5.0
"""The length of average above which the second moment's variance is known well enough to divide by it."""


class RAdam(TwoMoments):
    """`torch.optim.RAdam` for weights stored in BF16: Adam with a built-in warm-up.

    The first steps (five of them at β2 = 0.999) follow the first moment alone; from there on Adam's step grows to its
    full size.

    States: `exp_avg`, `exp_avg_sq`, of the parameter's shape, BF16 by default; `compensation` (BF16) with
    `rounding="kahan"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with Kahan summation, 8 with the other modes. FP32 parameters take
    16.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1); up to β2 = 2/3 the second is never used.
        eps: added to the root of the second moment, before its bias is corrected.
        weight_decay: coefficient of the L2 penalty, added to the gradient.
        decoupled_weight_decay: decay as AdamW does instead of by the penalty.
        maximize: ascend instead of descend.

    `rounding`, `state_dtype`, `seed` and the other keywords that every optimizer takes, and the errors raised, are
    those of `LowPrecisionOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
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
                "decoupled_weight_decay": decoupled_weight_decay,
                "maximize": maximize,
            },
            **shared,
        )

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Where the decay goes."""
        return {"amsgrad": False, "decoupled": bool(group["decoupled_weight_decay"])}

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Adam's, with the rectification in the step size: `r = √((ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ))` where `ρ > 5`.

        Below that the denominator is one. Of the two cases one is chosen by products with 0 and 1, which numbers and
        tensors both have.
        """
        adam = super().scalars(group, lr, step)
        beta2 = group["betas"][1]
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        known = (length > _SHORTEST) * 1.0
        unknown = 1 - known
        longest, length = max(longest, _SHORTEST), known * length + unknown * _SHORTEST
        rectification = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
        root_correction = known * adam["root_correction"]
        return {
            **adam,
            "step_size": adam["step_size"] * (known * rectification + unknown),
            "root_correction": root_correction,
            "eps": root_correction * group["eps"] + unknown,
        }
