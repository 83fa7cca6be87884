"""One optimizer step on one spec: load → update → round → store, as torch code.

`fused_step` is the only place where an algorithm, a rounding mode and the random bits meet. The `eager` backend runs
it on tensors; the others compile a trace of it (see `trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm import Formula, Update
from hf_lowprec.rounding import MODES, State, random_word, round_nearest, round_stochastic
from hf_lowprec.rounding.random import lane, word_of

CLIP = "clip"
"""The scalar, common to all parameters, that brings the gradient's norm down; of clipped specs."""
MEAN = "tensor_mean"
"""The scalar that holds the mean of an algorithm's `tensor_mean` formula over a parameter."""
ORTHOGONALIZED, LR_SCALE = "orthogonalized", "lr_scale"
"""The BF16 tensor that an algorithm's `orthogonalize` makes of a matrix, and the scalar by which its step is multiplied."""


@dataclass(frozen=True)
class StoredState:
    """A state tensor as it is stored: name, role of its random bits, dtype and how it is rounded on the way there."""

    name: str
    role: int
    dtype: torch.dtype
    stochastic: bool

    @classmethod
    def of(cls, state: State, dtype: torch.dtype, state_rounding: str) -> StoredState:
        stochastic = dtype == torch.bfloat16 and state_rounding == "stochastic" and state.averages
        return cls(state.name, state.role, dtype, stochastic)


@dataclass(frozen=True)
class StepSpec:
    """Everything that shapes the arithmetic of a step; parameters of equal spec go through one kernel.

    Attributes:
        update: the algorithm's formula, `(weight, grad, state, scalars, **options) -> (update, new_state)`.
        options: the formula's static options, as sorted `(name, value)` pairs.
        scalars: names of the host-computed FP32 factors the formula takes.
        rounding: name of the rounding mode.
        param_dtype: storage dtype of the parameter.
        grad_dtype: storage dtype of the gradient.
        states: the algorithm's states, in its own order, then the mode's auxiliary ones.
        maximize: whether the gradient is negated first.
        clipped: whether it is multiplied with the scalar `clip` before that.
        tensor_mean: an elementwise formula whose mean over each parameter `update` takes as `scalars.tensor_mean`; None if
            it takes none.
        orthogonalizes: whether the formula needs a `direction` for every parameter.
    """

    update: Update
    options: tuple[tuple[str, Any], ...]
    scalars: tuple[str, ...]
    rounding: str
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    states: tuple[StoredState, ...]
    maximize: bool
    clipped: bool = False
    tensor_mean: Formula | None = None
    orthogonalizes: bool = False

    @cached_property
    def host_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that are known before any tensor is looked at as a whole."""
        return (*self.scalars, CLIP) if self.clipped else self.scalars

    @cached_property
    def all_scalars(self) -> tuple[str, ...]:
        """Names of all scalars that the step takes."""
        return (*self.host_scalars, *self.per_param_scalars)

    @cached_property
    def per_param_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that belong to single parameters, at most one."""
        return (MEAN,) if self.tensor_mean is not None else (LR_SCALE,) if self.orthogonalizes else ()

    @cached_property
    def read(self) -> dict[str, torch.dtype]:
        """Storage dtypes of a parameter's tensors that a step only reads, by name."""
        return {"grad": self.grad_dtype} | ({ORTHOGONALIZED: torch.bfloat16} if self.orthogonalizes else {})

    @cached_property
    def written(self) -> dict[str, torch.dtype]:
        """Those of the tensors that it writes: the parameter itself and its states."""
        return {"param": self.param_dtype} | {state.name: state.dtype for state in self.states}

    @cached_property
    def tensors(self) -> dict[str, torch.dtype]:
        """All of them, in the order in which backends take them: parameter, gradient, direction, states."""
        return {"param": self.param_dtype, **self.read, **self.written}

    @cached_property
    def random_words(self) -> tuple[int, ...]:
        """The random words (see `word_of`) that a step of this spec draws."""
        roles = [state.role for state in self.states if state.stochastic]
        if self.rounding == "stochastic" and self.param_dtype != torch.float32:
            roles.append(0)
        return tuple(sorted({word_of(role) for role in roles}))

    @cached_property
    def stream_names(self) -> tuple[str, ...]:
        """Names of the halves of a segment's streams (see `stream_keys`), two for each random word."""
        return tuple(f"stream{word}_{half}" for word in self.random_words for half in (0, 1))

    @cached_property
    def key_names(self) -> tuple[str, ...]:
        """Names of the keys that a step makes of them, in the same order."""
        return tuple(f"key{word}_{half}" for word in self.random_words for half in (0, 1))


def wanted_update(
    spec: StepSpec, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The change of the weight that the algorithm wants and its new states, FP32 and not rounded."""
    return evaluate(spec.update, spec, weight, grad, state, scalars)


def evaluate(
    formula: Callable[..., Any],
    spec: StepSpec,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> Any:
    """One of an algorithm's elementwise formulas, of the gradient as `spec` has it clipped and signed."""
    if spec.clipped:
        grad = grad * scalars[CLIP]
    return formula(
        weight,
        -grad if spec.maximize else grad,
        SimpleNamespace(**state),
        SimpleNamespace(**scalars),
        **dict(spec.options),
    )


def fused_step(
    spec: StepSpec,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    index: Tensor,
    keys: Mapping[int, tuple[Any, Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the new weight and states of some elements.

    Args:
        spec: what to compute.
        weight: FP32 tensor of the elements' weights.
        grad: FP32 tensor of their gradients.
        state: FP32 tensors by state name, and the direction of orthogonalizes specs.
        scalars: FP32 factors by name (numbers, or tensors that broadcast).
        index: int32 tensor, the low words of their global indices.
        keys: `(key0, key1)` of this step by random word.

    Returns:
        `(weight', state')`: FP32 tensors whose values the storage dtypes represent exactly.
    """
    words: dict[int, Tensor] = {}

    def draw(role: int) -> Tensor:
        word = word_of(role)
        if word not in words:
            words[word] = random_word(index, *keys[word])
        return lane(words[word], role)

    update, new_state = wanted_update(spec, weight, grad, state, scalars)
    if spec.param_dtype == torch.float32:
        new_weight = weight + update
    else:
        new_weight, auxiliary = MODES[spec.rounding].add(weight, update, state, draw, spec.param_dtype)
        new_state = {**new_state, **auxiliary}

    def store(stored: StoredState) -> Tensor:
        value = new_state[stored.name]
        return round_stochastic(value, draw(stored.role)) if stored.stochastic else round_nearest(value, stored.dtype)

    return new_weight, {stored.name: store(stored) for stored in spec.states}
