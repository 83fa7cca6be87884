"""AdamW (Loshchilov & Hutter, arXiv:1711.05101, Alg. 2). The formula is in `adam.py`.

The decay is part of the update, which is rounded once.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.algorithms.adam import Adam
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer


class AdamW(Adam):
    """`torch.optim.AdamW` for weights stored in BF16: Adam with decoupled weight decay.

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
        weight_decay: decoupled decay; a step multiplies weights by `1 - lr·weight_decay`.
        amsgrad: use the maximum of all past second moments.
        maximize: maximize the objective instead of minimizing it.
        factored: keep the second moment of parameters with two or more dimensions as FP32 means over rows and columns,
            as Adafactor does, if that saves memory (2 bytes per parameter). A step then needs whole tensors.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        factored: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        LowPrecisionOptimizer.__init__(self, params, locals(), **shared)

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return `amsgrad` (use the maximum of the second moment) and `decoupled`, which is always true."""
        return {"amsgrad": bool(group["amsgrad"]), "decoupled": True}
