"""One optimizer step on one layout: load → update → round → store, as torch code.

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

from hf_lowprec.rounding import MODES, State, random_word, round_nearest, round_stochastic
from hf_lowprec.rounding.random import lane, word_of

CLIP = "clip"
"""The scalar, common to all parameters, that brings the gradient's norm down; of clipped layouts."""
MEAN = "mean"
"""The scalar that holds the mean of an algorithm's `measure` over a parameter."""
DIRECTION, RATIO = "direction", "ratio"
"""The BF16 tensor that an algorithm's `direction` makes of a matrix, and the scalar by which its step is multiplied."""

Update = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Formula = Callable[..., Tensor]


@dataclass(frozen=True)
class Stored:
    """A state tensor as it is stored: name, role of its random bits, dtype and how it is rounded on the way there."""

    name: str
    role: int
    dtype: torch.dtype
    stochastic: bool

    @classmethod
    def of(cls, state: State, dtype: torch.dtype, state_rounding: str) -> Stored:
        stochastic = dtype == torch.bfloat16 and state_rounding == "stochastic" and state.averages
        return cls(state.name, state.role, dtype, stochastic)


@dataclass(frozen=True)
class Layout:
    """Everything that shapes the arithmetic of a step; parameters of equal layout go through one kernel.

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
        measure: what the formula needs the mean of, an elementwise formula of the same arguments.
        directed: whether the formula needs a `direction` for every parameter.
    """

    update: Update
    options: tuple[tuple[str, Any], ...]
    scalars: tuple[str, ...]
    rounding: str
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    states: tuple[Stored, ...]
    maximize: bool
    clipped: bool = False
    measure: Formula | None = None
    directed: bool = False

    @cached_property
    def known(self) -> tuple[str, ...]:
        """Names of the scalars that are known before any tensor is looked at as a whole."""
        return (*self.scalars, CLIP) if self.clipped else self.scalars

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Names of all scalars that the step takes."""
        return (*self.known, *self.own)

    @cached_property
    def own(self) -> tuple[str, ...]:
        """Names of the scalars that belong to single parameters, at most one."""
        return (MEAN,) if self.measure is not None else (RATIO,) if self.directed else ()

    @cached_property
    def read(self) -> dict[str, torch.dtype]:
        """Storage dtypes of a parameter's tensors that a step only reads, by name."""
        return {"grad": self.grad_dtype} | ({DIRECTION: torch.bfloat16} if self.directed else {})

    @cached_property
    def written(self) -> dict[str, torch.dtype]:
        """Those of the tensors that it writes: the parameter itself and its states."""
        return {"param": self.param_dtype} | {state.name: state.dtype for state in self.states}

    @cached_property
    def tensors(self) -> dict[str, torch.dtype]:
        """All of them, in the order in which backends take them: parameter, gradient, direction, states."""
        return {"param": self.param_dtype, **self.read, **self.written}

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The random words (see `word_of`) that a step of this layout draws."""
        roles = [state.role for state in self.states if state.stochastic]
        if self.rounding == "stochastic" and self.param_dtype != torch.float32:
            roles.append(0)
        return tuple(sorted({word_of(role) for role in roles}))

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the halves of a row's streams (see `stream_keys`), two for each random word."""
        return tuple(f"stream{word}_{half}" for word in self.words for half in (0, 1))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of the keys that a step makes of them, in the same order."""
        return tuple(f"key{word}_{half}" for word in self.words for half in (0, 1))


def wanted_update(
    layout: Layout, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The change of the weight that the algorithm wants and its new states, FP32 and not rounded."""
    return evaluate(layout.update, layout, weight, grad, state, scalars)


def evaluate(
    formula: Callable[..., Any],
    layout: Layout,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> Any:
    """One of an algorithm's elementwise formulas, of the gradient as `layout` has it clipped and signed."""
    if layout.clipped:
        grad = grad * scalars[CLIP]
    return formula(
        weight,
        -grad if layout.maximize else grad,
        SimpleNamespace(**state),
        SimpleNamespace(**scalars),
        **dict(layout.options),
    )


def fused_step(
    layout: Layout,
    weight: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    index: Tensor,
    keys: Mapping[int, tuple[Any, Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the new weight and states of some elements.

    Args:
        layout: what to compute.
        weight: FP32 tensor of the elements' weights.
        grad: FP32 tensor of their gradients.
        state: FP32 tensors by state name, and the direction of directed layouts.
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

    update, new_state = wanted_update(layout, weight, grad, state, scalars)
    if layout.param_dtype == torch.float32:
        new_weight = weight + update
    else:
        new_weight, auxiliary = MODES[layout.rounding].add(weight, update, state, draw, layout.param_dtype)
        new_state = {**new_state, **auxiliary}

    def store(stored: Stored) -> Tensor:
        value = new_state[stored.name]
        return round_stochastic(value, draw(stored.role)) if stored.stochastic else round_nearest(value, stored.dtype)

    return new_weight, {stored.name: store(stored) for stored in layout.states}
