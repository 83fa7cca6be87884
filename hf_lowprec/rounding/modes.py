"""Rounding modes: how an FP32 update is added to a low-precision weight.

Each mode declares its auxiliary state, the parameter dtypes it supports and its arithmetic. A new mode is a new entry
of `MODES`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_lowprec.rounding.block_floats import scale_shape
from hf_lowprec.rounding.kahan import kahan_add
from hf_lowprec.rounding.nearest import round_nearest
from hf_lowprec.rounding.split import join, split
from hf_lowprec.rounding.stochastic import round_stochastic

DrawBits = Callable[[int], Tensor]
"""Returns 16 random bits per element for a role, as int32 in [0, 65536)."""

Auxiliary = Mapping[str, Tensor]
"""A mode's auxiliary states by name: FP32, or int32 if they are stored as integers."""

Rounding = Literal["kahan", "split", "stochastic", "nearest", "sr"]
"""The values of the argument `rounding`: the names of `MODES`, and the short ones."""
StateRounding = Literal["stochastic", "nearest"]
"""The values of the argument `state_rounding`."""
CODE_SUFFIX, SCALE_SUFFIX = "_code", "_scale"
"""What follows the name of an 8-bit state in the keys of its codes and scales. Under the name itself, other optimizers
would take codes for values."""
SHORT_NAMES = {"sr": "stochastic"}
"""Short names of modes, as in `optim="adamw_bf16_sr"`."""


@dataclass(frozen=True)
class State:
    """A state tensor that every parameter of an algorithm or mode has.

    Attributes:
        name: its key in `optimizer.state[param]`, unless it is stored in 8 bits.
        role: the role of its random bits, see `random_bits.py`.
        accumulates: whether it averages or adds up over steps, as compensations do; if so, rounding in BF16 must be
            unbiased. Other states are rounded to nearest.
        holds_low_bits: whether it holds the part of the weight that the stored weight lacks, and starts with it.
        dtype: the dtype in which it is always stored; None if the user chooses it (`state_dtype`).
        nonnegative: whether no element is ever negative; then 8 bits need not store a sign.
        scale_of: the name of the state in 8 bits whose scales it holds, one per block; None for all other states.
        factored: the names of its means over rows and over columns, which replace it for parameters with two or more
            dimensions; None for states that all parameters have.
        if_smaller: whether the means replace it only where they take less memory than the state in BF16.
        mean_over: the dimension, -1 or -2, over which it is a mean, and in which its length is 1; None for states of
            the parameter's shape.
    """

    name: str
    role: int
    accumulates: bool = True
    holds_low_bits: bool = False
    dtype: torch.dtype | None = None
    nonnegative: bool = False
    scale_of: str | None = None
    factored: tuple[str, str] | None = None
    if_smaller: bool = False
    mean_over: int | None = None

    def of_shape(self, shape: torch.Size) -> tuple[State, ...]:
        """Return the states that parameters of `shape` have for it: itself, or its FP32 means."""
        smaller = 2 * sum(shape[-2:]) < math.prod(shape[-2:])  # four bytes for each row and column, two for an element
        if self.factored is None or len(shape) < 2 or (self.if_smaller and not smaller):
            return (self,)
        return tuple(
            State(name, self.role, accumulates=False, dtype=torch.float32, mean_over=dim)
            for name, dim in zip(self.factored, (-1, -2), strict=True)
        )

    def shape_for(self, shape: torch.Size) -> torch.Size:
        """Return its shape for a parameter, or a part of one, of `shape`."""
        if self.scale_of is not None:
            return scale_shape(shape)
        if self.mean_over is None:
            return shape
        dim = self.mean_over % len(shape)
        return torch.Size((*shape[:dim], 1, *shape[dim + 1 :]))


@dataclass(frozen=True)
class StoredState(State):
    """A state as it is stored for a parameter.

    Attributes:
        dtype: its dtype. Codes of `block_floats.py` are int8, and another state holds their scales.
        stochastic: whether it is rounded stochastically.
    """

    dtype: torch.dtype = torch.bfloat16
    stochastic: bool = False

    @classmethod
    @functools.cache
    def of(cls, state: State, dtype: torch.dtype, state_rounding: str) -> StoredState:
        """Store `state` in `dtype`. Only averages are rounded stochastically: to BF16 on request, to 8 bits always."""
        asked = dtype == torch.bfloat16 and state_rounding == "stochastic"
        stochastic = state.accumulates and (asked or dtype == torch.int8)
        return cls(**{**vars(state), "dtype": dtype, "stochastic": stochastic})

    @property
    def key(self) -> str:
        """Its key in `optimizer.state[param]`."""
        return self.name + CODE_SUFFIX if self.dtype == torch.int8 else self.name


@dataclass(frozen=True)
class Mode:
    """A rounding mode.

    Attributes:
        name: the value of the optimizers' argument `rounding`.
        add: `(weight, update, auxiliary, random_bits, dtype) -> (weight', auxiliary')`. `weight` is what `load` has
            returned, and `weight'` is representable in `dtype`, both FP32; the caller rounds `auxiliary'` for storage.
        auxiliary: the mode's own states. All have a `dtype`.
        dtypes: the parameter dtypes that the mode supports.
        load: `(weight, auxiliary) -> FP32 weight`, which the algorithm's formula sees and the update is added to. By
            default, it is the stored weight.
        random: whether `add` draws random bits: it rounds the weight stochastically.
    """

    name: str
    add: Callable[[Tensor, Tensor, Auxiliary, DrawBits, torch.dtype], tuple[Tensor, dict[str, Tensor]]]
    auxiliary: tuple[State, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    load: Callable[[Tensor, Auxiliary], Tensor] = lambda weight, auxiliary: weight
    random: bool = False

    @property
    def has_compensation(self) -> bool:
        """True if it keeps rounding errors in a state that is rounded itself, by `state_rounding`."""
        return any(state.accumulates for state in self.auxiliary)


WEIGHT_ROLE = 0
"""The role of the random bits of the weight, or of the compensation: no mode needs both."""


def _add_nearest(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, random_bits: DrawBits, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    return round_nearest(weight + update, dtype), {}


def _add_stochastic(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, random_bits: DrawBits, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    return round_stochastic(weight + update, random_bits(WEIGHT_ROLE)), {}


def _add_kahan(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, random_bits: DrawBits, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    total, compensation = kahan_add(weight, update, auxiliary["compensation"], dtype)
    return total, {"compensation": compensation}


def _add_split(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, random_bits: DrawBits, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    stored, remainder = split(weight + update)
    return stored, {"remainder": remainder}


def _load_split(weight: Tensor, auxiliary: Auxiliary) -> Tensor:
    return join(weight, auxiliary["remainder"])


_COMPENSATION = State("compensation", role=WEIGHT_ROLE, holds_low_bits=True, dtype=torch.bfloat16)
_REMAINDER = State("remainder", role=WEIGHT_ROLE, accumulates=False, holds_low_bits=True, dtype=torch.int16)
_BF16_ONLY = (torch.bfloat16, torch.float32)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("kahan", _add_kahan, auxiliary=(_COMPENSATION,)),
        Mode("split", _add_split, (_REMAINDER,), _BF16_ONLY, _load_split),
        Mode("stochastic", _add_stochastic, dtypes=_BF16_ONLY, random=True),
        Mode("nearest", _add_nearest),
    )
}
"""Every mode by its name."""

AUXILIARY_STATES: dict[str, State] = {state.name: state for mode in MODES.values() for state in mode.auxiliary}
"""The auxiliary states of all modes by name."""

LOW_BITS_STATES = tuple(name for name, state in AUXILIARY_STATES.items() if state.holds_low_bits)
"""Names of the states that hold low bits, see `low_bits.py`. A parameter has at most one of them, except between a
change of its mode and the next step."""


def mode_name(rounding: str) -> str:
    """Return the name of a mode that may be given by its short name. Other values are returned as they are."""
    return SHORT_NAMES.get(rounding, rounding) if isinstance(rounding, str) else rounding


def recommended_mode(dtypes: Collection[torch.dtype]) -> str:
    """Return the mode to advise for weights of these dtypes: split weights, or Kahan summation if some are FP16."""
    return "kahan" if torch.float16 in dtypes else "split"
