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
"""Below this, updates do not change a weight, and nothing is fed back: FP32 could not hold the factor."""
LEAST_RATE = 0.1
"""The share of a schedule's `initial_lr` below which rounding errors are not fed back in full."""


def coming_bias_correction(beta: float, step: Any) -> Any:
    """The bias correction `1/(1-βᵗ)` of the steps after `step`, averaged with weights `βᵏ`, to within 2%.

    With an integral in place of the sum, `-log(1-z)/z` with `z = βᵗ⁺¹ᐟ²`, which does not become zero.
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
    skipped_before: int
    """Steps that `skip_nonfinite` had skipped when the states that were loaded were saved."""

    update: ClassVar[Update]
    """The formula, a static method: `(weight, grad, state, scalars, **options) -> (change of the weight, new states)`.

    It takes and returns FP32 values and may use operators, `torch.where` and `sqrt_rn`; `fused_step` calls it.
    """

    averaged_square: ClassVar[Formula | None] = None
    """A static method with the arguments of `update`: the square whose average a factored state is. Where a parameter
    has its means over rows and columns, formulas get the root of the average as the product of `state.row_factor` and
    `state.column_factor`."""

    feed_back: ClassVar[Callable[..., dict[str, Tensor]] | None] = None
    """Error feedback (as ECO's, arXiv:2601.22101), a static method: `(error, state, scalars, **options) -> new states`.

    It takes `error`, what stochastic rounding took from the weight in this step, and returns the momentum with which
    the following steps add it again, in all. `state` has the new states, and `scalars.feedback` is from `feedback`.
    None: the update is not linear in a momentum.
    """

    arguments: ClassVar[Mapping[str, Argument]] = {}
    """What is valid for the algorithm's own arguments, where neither `COMMON` nor their default says it. Python's call
    of `__init_subclass__` adds all others, and the `flags`."""

    named_defaults: ClassVar[dict[str, Any]] = {}
    """Arguments with which an `optim=` string differs from the constructor, so that it agrees with Trainer's own."""

    flags: ClassVar[tuple[str, ...]] = ()
    """Boolean keys of parameter groups that the constructor does not take."""

    gradients: Any
    """Where gradients are before a step, see `gradients/`."""

    elements_at_once: float = math.inf
    """Parameters that are alike are stepped in fused groups of at most so many elements."""

    def __init_subclass__(cls) -> None:
        """Complete `arguments`, and show the keywords that a constructor takes as `**shared` in its signature."""
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
        """The states of parameters in `group`, in the order in which they are stored."""
        raise NotImplementedError

    def scalars(self, group: ParamGroup, lr: float, step: int) -> dict[str, float]:
        """The factors of step number `step` (from 1), computed in double precision. Each is cast to FP32 once."""
        raise NotImplementedError

    def options(self, group: ParamGroup) -> dict[str, bool]:
        """Static options of the formula. Each combination gets its own kernel."""
        return {}

    def tensor_means(self, group: ParamGroup) -> dict[str, Formula]:
        """Formulas, by name, that take the arguments of `update`. It gets their means over the parameter as scalars."""
        return {}

    def orthogonalizes(self, group: ParamGroup) -> bool:
        """Return whether `update` takes `state.orthogonalized`, made from a whole matrix; see `MatrixAlgorithm`."""
        return False

    def takes_means(self, group: ParamGroup) -> bool:
        """Return whether an element's step depends on means over other elements of its parameter."""
        return bool(self.tensor_means(group)) or any(state.factored for state in self.states(group))

    def momentum_decay(self, group: ParamGroup) -> float:
        """The decay rate β of the momentum that `feed_back` changes; 0 without one."""
        return float(group["betas"][0]) if self.feed_back else 0.0

    def feeds_back(self, group: ParamGroup) -> bool:
        """Return whether rounding errors of the weights in `group` are fed back through the momentum."""
        mode = MODES.get(group["rounding"])
        possible = mode is not None and mode.random and 0 < self.momentum_decay(group) < 1
        return possible and self.error_feedback is not False

    def feedback(self, group: ParamGroup, lr: float, factor: float = 1) -> dict[str, float]:
        """The scalar `feedback` of `feed_back`, `(1-β)/(a·β)`; empty without error feedback.

        A momentum that decays by β is added `a = lr·factor` times in a step, so it adds `a·β + a·β² + … = 1 / feedback`
        in the steps to come, if the learning rate stays. If a schedule raises it again from almost zero, that would be
        too much: so `lr` counts as at least `LEAST_RATE` of the schedule's `initial_lr`.

        Args:
            group: the parameter group.
            lr: its learning rate; a number, or an FP64 tensor.
            factor: see above.
        """
        if not self.feeds_back(group):
            return {}
        decay, least = self.momentum_decay(group), LEAST_RATE * group.get("initial_lr", 0.0)
        added = decay * factor * (lr > 0) * (lr + (least > lr) * (least - lr))
        return {"feedback": (added > _SMALLEST) / (added * (added > _SMALLEST) + (added <= _SMALLEST)) * (1 - decay)}

    def check_hyperparameters(self, group: ParamGroup) -> None:
        """Raise ValueError if hyperparameters, each of which is valid by itself, do not go together."""

    def state_device(self, param: Tensor) -> torch.device:
        """Where the states of `param` are."""
        return torch.device("cpu") if self.offload_states else param.device

    def gradient_device(self, param: Tensor) -> torch.device:
        """Where the gradient of `param` is in a step."""
        return torch.device("cpu") if self.offload_gradients else param.device

    def stored_states(self, group: ParamGroup, param: Tensor) -> tuple[State, ...]:
        """The algorithm's states that `param` has and, if it is low-precision, those of the rounding mode."""
        shape = full_shape(param)
        states = tuple(stored for state in self.states(group) for stored in state.of_shape(shape))
        return states if param.dtype == torch.float32 else states + MODES[group["rounding"]].auxiliary
