"""Schedule-Free AdamW (Defazio et al., arXiv:2405.15682, Alg. 1): averages weights instead of using a schedule.

The paper has three sequences of weights: steps are taken from z, gradients are computed at y, and x, the average of z,
is the result, with `y = (1-β1)·z + β1·x`. The parameter holds y. The state is `z - y = β1·(z - x)`, not z: it starts at
zero and is as small as a few steps, so BF16 suits it as well as a moment. Rounding z would be rounding weights.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hf_lowprec.optim.algorithm_interface import ParamGroup, Step, Values
from hf_lowprec.optim.arguments import Argument, Shared
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.fp32_weights import add_to_weights
from hf_lowprec.optim.state.states import value_in
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.rounding import State, sqrt_rn


class ScheduleFreeAdamW(LowPrecisionOptimizer):
    """AdamW that averages its weights, and needs no learning rate schedule.

    Call `eval()` before the model is evaluated or saved, and `train()` before training continues. Trainer does so.

    It is `AdamWScheduleFreePaper` from the package schedulefree. The class that the package recommends and Trainer's
    `optim="schedule_free_adamw"` uses, `AdamWScheduleFree`, is a different algorithm: it divides the second moment by
    `1-β2ᵗ`, where Algorithm 1 multiplies the learning rate by `√(1-β2ᵗ)`. So with that class, the first `1/(1-β2)`
    steps count fully in the average and in the weight decay, `eps` is added after the correction, and changing the
    learning rate changes a step's weight in the average. From the same gradients, averages here have moved 1.3 times as
    far after 60 to 1000 steps with the default betas, and 1.15 times as far after 5000.

    States: `exp_avg_sq` and `z_minus_y`, in the parameter's shape and in BF16 by default; `compensation` (BF16) with
    `rounding="kahan"`, `remainder` (int16) with `rounding="split"`; `step`, an int64 scalar.

    Bytes per parameter, gradient included: 10 with `kahan` and `split`, 8 with the other modes. FP32 parameters take
    16.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a one-element tensor. Keep it constant; the average ignores a schedule.
        betas: the share of the average in y (the weights at which gradients are computed), in (0, 1), and the decay
            rate of the second moment, in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: decoupled decay of y, multiplied by the learning rate.
        warmup_steps: steps in which the learning rate grows linearly, and the weight in the average quadratically.
        maximize: maximize the objective instead of minimizing it.

    The keyword arguments of every optimizer (`rounding`, `state_dtype`, `seed`, …) and the errors raised are described
    in `LowPrecisionOptimizer` and, in the documentation, under "Arguments of every optimizer".
    """

    arguments: ClassVar = {"warmup_steps": Argument(int, ge=0)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        *,
        maximize: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(params, {**locals(), "train_mode": True}, **shared)

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if y would not contain the average."""
        if group["betas"][0] == 0:
            raise ValueError("betas[0]=0 is invalid; it must be above 0, or y would not contain the average")

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the second moment, and the difference between z and y."""
        return State("exp_avg_sq", role=1, nonnegative=True), State("z_minus_y", role=2)

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Return factors with `c = w_t / Σ w_k`; `w_k = min(1, k/W)²·(1-β2ᵏ)` are the squares of the learning rates.

        `step` may be a tensor.
        """
        (beta1, beta2), warmup = group["betas"], group["warmup_steps"]
        time = step.double() if isinstance(step, Tensor) else torch.tensor(step, dtype=torch.float64, device="cpu")
        k = torch.arange(warmup + 1, dtype=torch.float64, device=time.device)
        warmup_steps, warmup_factor = time.clamp(max=warmup), (time / warmup).clamp(max=1)
        total = ((k / max(warmup, 1)) ** 2 * (1 - beta2**k)).cumsum(0)[warmup_steps.long()]
        # After the warm-up, a geometric series.
        total = total + (time - warmup_steps) - (beta2 ** (warmup_steps + 1) - beta2 ** (time + 1)) / (1 - beta2)
        correction = 1 - beta2**time
        share, rate = warmup_factor**2 * correction / total, warmup_factor * correction.sqrt()
        if not isinstance(step, Tensor):
            share, rate = share.item(), rate.item()
        return {
            "beta2": beta2,
            "gain2": 1 - beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "share": share,
            "kept": 1 - share,
            "step_of_y": lr * rate * (1 - beta1 * (1 - share)),
            "step_of_z_minus_y": lr * rate * beta1 * (1 - share),
        }

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Values, scalars: Values) -> Step:
        """`z' = z - γ·n`, `x' = (1-c)·x + c·z'`, with `n = g/(√v + ε) + wd·y`, in terms of y and `d = z - y`.

        `u = c·d - γ·(1 - β1·(1-c))·n`, `d' = (1-c)·(d - γ·β1·n)`, where `γ = lr·min(1, t/W)·√(1-β2ᵗ)`.
        """
        exp_avg_sq = state.exp_avg_sq * scalars.beta2 + grad * grad * scalars.gain2
        direction = grad / (sqrt_rn(exp_avg_sq) + scalars.eps) + weight * scalars.weight_decay
        return state.z_minus_y * scalars.share - direction * scalars.step_of_y, {
            "exp_avg_sq": exp_avg_sq,
            "z_minus_y": state.z_minus_y * scalars.kept - direction * scalars.step_of_z_minus_y,
        }

    def prepare_step(self, plan: StepPlan) -> Tensor | None:
        """Do what the base class does. Raises RuntimeError if the parameters hold the averages."""
        if not all(group.get("train_mode", True) for group in self.param_groups):
            raise RuntimeError("the parameters hold the averages x: call optimizer.train() before the forward pass")
        return super().prepare_step(plan)

    def train(self) -> None:
        """Let the parameters hold y, at which gradients are computed."""
        self._set_mode(True)

    def eval(self) -> None:
        """Let the parameters hold the averages x, rounded to nearest."""
        self._set_mode(False)

    @without_grad
    def _set_mode(self, train: bool) -> None:
        groups = [group for group in self.param_groups if group.get("train_mode", True) != train]
        if groups:
            self.gradients.check_between_steps("train()" if train else "eval()")
        with interrupts.deferred():
            for group in groups:
                factor = (1 / group["betas"][0] - 1) * (1 if train else -1)  # y - x = (1/β1 - 1)·(z - y)
                for param in group["params"]:
                    if state := self.state.get(param):
                        change = local_shard(value_in(state, "z_minus_y"))
                        add_to_weights(param, state, change, factor)
                group["train_mode"] = train
