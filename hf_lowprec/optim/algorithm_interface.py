"""The interface between an algorithm and the code that steps it: states, scalars, options and the update formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_lowprec.optim.arguments import Argument, complete_arguments, full_signature
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.rounding import MODES, State

ParamGroup = dict[str, Any]
"""An entry of `optimizer.param_groups`."""

Values = SimpleNamespace
"""The states or the scalars of a formula: FP32 values as attributes."""

Step = tuple[Tensor, dict[str, Tensor]]
"""The change of a weight, and the new states by name."""

Update = Callable[..., Step]
Formula = Callable[..., Tensor]

_SMALLEST = 2.0**-100
"""Updates below this do not change a weight, and nothing is fed back: FP32 could not hold the factor."""
LEAST_RATE = 0.1
"""The share of a schedule's `initial_lr` below which rounding errors are not fed back in full."""


def coming_bias_correction(beta: float, step: Any) -> Any:
    """Return the bias correction `1/(1-βᵗ)` of the steps after `step`, averaged with weights `βᵏ`, to within 2%.

    It replaces the sum with an integral, `-log(1-z)/z` with `z = βᵗ⁺¹ᐟ²`, which does not become zero.
    """
    decayed = beta ** (step + 0.5) + 1e-30
    return -(torch.log1p if isinstance(step, Tensor) else math.log1p)(-decayed) / decayed


class Algorithm(torch.optim.Optimizer):
    """Declares the arithmetic that a subclass must define, and the settings that every optimizer has."""

    backend: str
    error_feedback: bool | None = None
    max_grad_norm: float | None
    skip_nonfinite: bool
    gradient_release: bool = False
    offload_states: bool = False
    offload_gradients: bool = False
    clip: str = "exact"
    warns_of_fp32: bool = True
    """Whether a step warns if all weights are FP32. Under Trainer, the report mentions it instead."""
    skipped_before: int
    """The number of steps that `skip_nonfinite` had skipped when the loaded states were saved."""

    update: ClassVar[Update]
    """The formula, a static method: `(weight, grad, state, scalars, **options) -> (change of the weight, new states)`.

    It takes and returns FP32 values and may use operators, `torch.where` and `sqrt_rn`; `fused_step` calls it.
    """

    averaged_square: ClassVar[Formula | None] = None
    """A static method with the arguments of `update`: the square that a factored state averages. If a parameter has
    means over rows and columns, formulas get the root of the average as the product of `state.row_factor` and
    `state.column_factor`."""

    feed_back: ClassVar[Callable[..., dict[str, Tensor]] | None] = None
    """Error feedback (as ECO's, arXiv:2601.22101), a static method: `(error, state, scalars, **options) -> new states`.

    It takes `error`, what stochastic rounding took from the weight in this step, and returns a momentum with which the
    following steps add all of it back. `state` has the new states, and `scalars.feedback` is from `feedback`. It is
    None if the update is not linear in a momentum.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {}
    """Valid values of the algorithm's own arguments, if neither `COMMON` nor their default gives them.
    `__init_subclass__` adds all others, and the `flags`."""

    named_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of an `optim=` string that differ from the constructor's, so that it agrees with Trainer's own."""

    flags: ClassVar[tuple[str, ...]] = ()
    """Boolean keys of param groups that the constructor does not take."""

    gradients: Any
    """Where gradients are before a step, see `gradients/`."""

    elements_at_once: float = math.inf
    """The largest number of elements in a fused group of like parameters."""

    def __init_subclass__(cls) -> None:
        """Complete `arguments`, and show in a constructor's signature the keywords that it takes as `**shared`."""
        cls.__signature__ = full_signature(cls)  # type: ignore[attr-defined]
        cls.arguments = complete_arguments(cls)

    @property
    def gradient_of(self) -> Callable[[Tensor], Any]:
        """A function, written in C, that returns a parameter's gradient in the coming step, or None."""
        function: Callable[[Tensor], Any] = self.gradients.gradient_of
        return function

    @property
    def skipped_steps(self) -> int:
        """The number of steps that `skip_nonfinite` has skipped."""
        raise NotImplementedError

    def states(self, group: ParamGroup) -> tuple[State, ...]:
        """Return the states of parameters in `group`, in the order in which they are stored."""
        raise NotImplementedError

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """Compute the factors of step `step` (from 1) in double precision. Each is cast to FP32 once."""
        raise NotImplementedError

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Return the formula's static options. Each combination gets its own kernel."""
        return {}

    def tensor_means(self, group: ParamGroup) -> dict[str, Formula]:
        """Return formulas by name, with the arguments of `update`. It gets their means over a parameter as scalars."""
        return {}

    def orthogonalizes(self, group: ParamGroup) -> bool:
        """Return whether `update` takes `state.orthogonalized`, made from a whole matrix; see `MatrixAlgorithm`."""
        return False

    def takes_means(self, group: ParamGroup) -> bool:
        """Return whether an element's step depends on means over other elements of its parameter."""
        return bool(self.tensor_means(group)) or any(state.factored for state in self.states(group))

    def momentum_decay(self, group: ParamGroup) -> float:
        """Return the decay rate β of the momentum that `feed_back` changes; 0 without one."""
        return float(group["betas"][0]) if self.feed_back else 0.0

    def feeds_back(self, group: ParamGroup) -> bool:
        """Return whether rounding errors of the weights in `group` are fed back through the momentum."""
        mode = MODES.get(group["rounding"])
        possible = mode is not None and mode.random and 0 < self.momentum_decay(group) < 1
        return possible and self.error_feedback is not False

    def feedback(self, group: ParamGroup, lr: float, factor: float = 1) -> dict[str, float]:
        """Return the scalar `feedback` of `feed_back`, `(1-β)/(a·β)`; empty without error feedback.

        A momentum that decays by β is added `a = lr·factor` times in a step, so it adds `a·β + a·β² + … = 1 / feedback`
        in the following steps, if the learning rate stays the same. If a schedule raises it again from almost zero,
        that would be too much, so `lr` counts as at least `LEAST_RATE` of the schedule's `initial_lr`.

        Args:
            group: the param group.
            lr: its learning rate; a number, or an FP64 tensor.
            factor: see above.
        """
        if not self.feeds_back(group):
            return {}
        decay, least = self.momentum_decay(group), LEAST_RATE * group.get("initial_lr", 0.0)
        added = decay * factor * (lr > 0) * (lr + (least > lr) * (least - lr))
        return {"feedback": (added > _SMALLEST) / (added * (added > _SMALLEST) + (added <= _SMALLEST)) * (1 - decay)}

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if hyperparameters that are valid by themselves cannot be combined."""

    def state_device(self, param: Tensor) -> torch.device:
        """Return the device of the states of `param`."""
        return torch.device("cpu") if self.offload_states else param.device

    def gradient_device(self, param: Tensor) -> torch.device:
        """Return the device of the gradient of `param` in a step."""
        return torch.device("cpu") if self.offload_gradients else param.device

    def stored_states(self, group: ParamGroup, param: Tensor) -> tuple[State, ...]:
        """Return the algorithm's states that `param` has and, if it is low-precision, those of the rounding mode."""
        shape = full_shape(param)
        states = tuple(stored for state in self.states(group) for stored in state.of_shape(shape))
        return states if param.dtype == torch.float32 else states + MODES[group["rounding"]].auxiliary
