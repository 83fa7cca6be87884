"""AdamW (Loshchilov & Hutter, arXiv:1711.05101, Alg. 2), with the decay inside the one rounded update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_lowprec.optim.algorithm import ParamGroup
from hf_lowprec.optim.algorithms._two_moments import TwoMoments
from hf_lowprec.optim.shared_keywords import Shared

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamW(TwoMoments):
    """`torch.optim.AdamW` for weights stored in BF16: Adam with decoupled weight decay.

    States: `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq` with `amsgrad`), of the parameter's shape, BF16 by default;
    `compensation` (BF16) with `rounding="kahan"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with Kahan summation, 8 with the other modes, 2 more with `amsgrad`.
    FP32 parameters take 16, with `amsgrad` 20.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the bias-corrected second moment.
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·weight_decay`.
        amsgrad: keep the maximum of the second moment.
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

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Whether the maximum of the second moment is used."""
        return {"amsgrad": bool(group["amsgrad"]), "decoupled": True}
