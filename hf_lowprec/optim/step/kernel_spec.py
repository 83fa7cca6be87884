"""Everything that determines the arithmetic of a step: the algorithm's formula, rounding mode, dtypes and scalars.

A `KernelSpec` is hashable: backends compile one kernel per spec, and step parameters with equal specs together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.once import cached_property
from hf_lowprec.optim.algorithm_interface import Formula, Update
from hf_lowprec.rounding import MODES
from hf_lowprec.rounding.modes import WEIGHT_ROLE, StoredState
from hf_lowprec.rounding.random_bits import word_of

CLIP = "clip"
"""Name of the scalar that multiplies gradients in `clipped` specs; it is the same for all parameters."""
LR_SCALE = "lr_scale"
"""Name of the scalar that multiplies the learning rate of an orthogonalized parameter."""
ORTHOGONALIZED = "orthogonalized"
"""Name of the BF16 tensor that an algorithm's `orthogonalize` makes of a matrix."""
ROW_FACTOR, COLUMN_FACTOR = "row_factor", "column_factor"
"""Names of the FP32 tensors, one element per row or column, whose product is the root of a factored second moment."""


@dataclass(frozen=True)
class KernelSpec:
    """Everything that determines the arithmetic of a step. Parameters with equal specs go through one kernel.

    Attributes:
        update: the algorithm's formula, see `Algorithm.update`.
        options: the formula's static options, as sorted `(name, value)` pairs.
        scalars: names of the FP32 scalars that `Algorithm.scalars` computes.
        rounding: name of the rounding mode.
        param_dtype: storage dtype of the parameter.
        grad_dtype: storage dtype of the gradient.
        states: the algorithm's states, in its order, then those of the rounding mode.
        maximize: whether the gradient is negated before the formula sees it.
        clipped: whether the gradient is multiplied by the scalar `clip` before that.
        tensor_means: elementwise formulas by name, as pairs; `update` takes their means over each parameter as scalars.
        orthogonalizes: whether `update` takes `state.orthogonalized` and `scalars.lr_scale`.
        factored: an elementwise formula, whose means over rows and columns are states and give the factors that other
            formulas take as `state.row_factor` and `state.column_factor`, see `whole_tensor_quantities.py`; or None.
        feed_back: the algorithm's `feed_back`, if rounding errors of the parameter are fed back.
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
    tensor_means: tuple[tuple[str, Formula], ...] = ()
    orthogonalizes: bool = False
    factored: Formula | None = None
    feed_back: Callable[..., dict[str, Tensor]] | None = None

    @cached_property
    def host_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that do not depend on the values of single parameters."""
        return (*self.scalars, CLIP) if self.clipped else self.scalars

    @cached_property
    def per_param_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that depend on the values or the shape of each parameter."""
        return (*(name for name, _ in self.tensor_means), *((LR_SCALE,) if self.orthogonalizes else ()))

    @cached_property
    def all_scalars(self) -> tuple[str, ...]:
        """Names of all scalars, in the order in which kernels take them."""
        return (*self.host_scalars, *self.per_param_scalars)

    @cached_property
    def input_tensors(self) -> dict[str, torch.dtype]:
        """Storage dtypes, by name, of the tensors that a step only reads."""
        factors = dict.fromkeys((ROW_FACTOR, COLUMN_FACTOR) if self.factored else (), torch.float32)
        orthogonalized = {ORTHOGONALIZED: torch.bfloat16} if self.orthogonalizes else {}
        return {"grad": self.grad_dtype} | orthogonalized | factors

    @cached_property
    def output_tensors(self) -> dict[str, torch.dtype]:
        """Storage dtypes, by name, of the tensors that a step reads and writes: the parameter and its states."""
        return {"param": self.param_dtype} | {state.name: state.dtype for state in self.states}

    @cached_property
    def tensors(self) -> dict[str, torch.dtype]:
        """Storage dtypes of a parameter's tensors in the kernels' order: parameter, gradient, matrix, states."""
        return {"param": self.param_dtype, **self.input_tensors, **self.output_tensors}

    @cached_property
    def integer_tensors(self) -> frozenset[str]:
        """Names of the tensors that hold integers. A step loads these as int32, and all others as FP32."""
        return frozenset(name for name, dtype in self.tensors.items() if not dtype.is_floating_point)

    @cached_property
    def scales(self) -> dict[str, str]:
        """Names of the tensors that hold the scales of 8-bit states, one per block, by the state's name."""
        return {state.scale_of: state.name for state in self.states if state.scale_of is not None}

    @cached_property
    def per_block_tensors(self) -> frozenset[str]:
        """Names of the tensors that have one element per block: the scales of states in 8 bits."""
        return frozenset(self.scales.values())

    @cached_property
    def random_words(self) -> tuple[int, ...]:
        """Numbers of the 32-bit random words that a step draws per element, see `word_of`."""
        roles = [state.role for state in self.states if state.stochastic]
        if MODES[self.rounding].random and self.param_dtype != torch.float32:
            roles.append(WEIGHT_ROLE)
        return tuple(sorted({word_of(role) for role in roles}))

    @cached_property
    def stream_names(self) -> tuple[str, ...]:
        """Names of a segment's stream keys (see `stream_keys`), two for each random word."""
        return tuple(f"stream{word}_{k}" for word in self.random_words for k in (0, 1))

    @cached_property
    def key_names(self) -> tuple[str, ...]:
        """Names of the step keys that a step derives from the stream keys, in the same order."""
        return tuple(f"key{word}_{k}" for word in self.random_words for k in (0, 1))
