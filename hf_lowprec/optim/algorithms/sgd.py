"""SGD with momentum (Sutskever et al., ICML 2013, in the form of `torch.optim.SGD`)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values
from hf_lowprec.optim.arguments import Argument, Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.rounding import State


class SGD(LowPrecisionOptimizer):
    """`torch.optim.SGD` for weights stored in BF16.

    States: `momentum_buffer`, if `momentum` is not zero, in the parameter's shape and in BF16 by default;
    `compensation` (BF16) with `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 6 with `kahan` and `split`, 4 with the other modes, plus 2 with momentum.
    FP32 parameters take 8, or 12 with momentum.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        momentum: momentum factor.
        dampening: dampening of the gradient in the momentum buffer, starting with the second step.
        weight_decay: coefficient of the L2 penalty, added to the gradient.
        nesterov: use Nesterov momentum; needs `momentum > 0` and no dampening.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    arguments: ClassVar = {"momentum": Argument(float, ge=0)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, locals(), **shared)

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if `nesterov` conflicts with the others."""
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening=0; got momentum={group['momentum']!r}, "
                f"dampening={group['dampening']!r}"
            )

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the momentum buffer, unless `momentum` is zero."""
        return (State("momentum_buffer", role=1),) if group["momentum"] else ()

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return the options `momentum` (use momentum) and `nesterov` (Nesterov momentum)."""
        return {"momentum": bool(group["momentum"]), "nesterov": bool(group["nesterov"])}

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return the scalars. As in torch, the first step adds the full gradient to the momentum, without dampening."""
        return {
            "lr": lr,
            "momentum": group["momentum"],
            "gain": 1 - group["dampening"] * (1 - 0.0 ** (step - 1)),
            "weight_decay": group["weight_decay"],
            **self.feedback(group, lr, group["momentum"] if group["nesterov"] else 1),
        }

    def momentum_decay(self, group: ParamGroup) -> float:
        """Return `momentum`."""
        return float(group["momentum"])

    @staticmethod
    def feed_back(error: Tensor, state: Values, scalars: Values, **options: bool) -> dict[str, Tensor]:
        """`v' = v - e·(1-μ)/(lr·μ)`, or `v - e·(1-μ)/(lr·μ²)` with Nesterov."""
        return {"momentum_buffer": state.momentum_buffer - error * scalars.feedback}

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values, momentum: bool, nesterov: bool) -> Step:
        """`g = grad + wd·w; v = μ·v + (1-dampening)·g; u = -lr·v`, or `-lr·(g + μ·v)` with Nesterov."""
        grad = grad + weight * scalars.weight_decay
        if not momentum:
            return -(grad * scalars.lr), {}
        buffer = state.momentum_buffer * scalars.momentum + grad * scalars.gain
        direction = grad + buffer * scalars.momentum if nesterov else buffer
        return -(direction * scalars.lr), {"momentum_buffer": buffer}
