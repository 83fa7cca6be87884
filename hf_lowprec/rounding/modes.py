"""Rounding modes: how an FP32 update enters a low-precision weight.

A mode owns its auxiliary state, that state's dtype and the arithmetic. A further mode is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lowprec.rounding.reference import kahan_add, round_nearest, round_stochastic

Draw = Callable[[int], Tensor]


Auxiliary = Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """A per-parameter state tensor.

    Attributes:
        name: its key in `optimizer.state`.
        role: the role of its random bits.
        stalls: whether its steps can be too small for nearest rounding in BF16, so that it needs stochastic rounding.
    """

    name: str
    role: int
    stalls: bool = True


def average_stalls(decay_rate: float) -> bool:
    """Whether a running average in BF16 can stall under nearest rounding.

    One step changes it by up to a share `1 - decay_rate`. Below half an ulp, 2^-9 of the value, nothing moves; from
    eight times that on nearest rounding is safe, and then better: its error has half the variance.
    """
    return 1 - decay_rate < 2**-6


@dataclass(frozen=True)
class Mode:
    """How a weight of a low-precision dtype takes an update.

    Attributes:
        name: the value of the optimizers' `rounding` argument.
        add: `(weight, update, auxiliary, draw, dtype) -> (weight', auxiliary')`, all FP32; `weight'` is representable
            in `dtype`, `auxiliary'` is rounded for storage by the caller; `draw(role)` gives 16 random bits per
            element.
        auxiliary: the state tensors the mode keeps, stored as BF16.
        dtypes: the parameter dtypes it supports.
    """

    name: str
    add: Callable[[Tensor, Tensor, Auxiliary, Draw, torch.dtype], tuple[Tensor, dict[str, Tensor]]]
    auxiliary: tuple[State, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


WEIGHT_ROLE = 0


def _add_nearest(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, draw: Draw, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    return round_nearest(weight + update, dtype), {}


def _add_stochastic(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, draw: Draw, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    return round_stochastic(weight + update, draw(WEIGHT_ROLE)), {}


def _add_kahan(
    weight: Tensor, update: Tensor, auxiliary: Auxiliary, draw: Draw, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    total, compensation = kahan_add(weight, update, auxiliary["compensation"], dtype)
    return total, {"compensation": compensation}


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("kahan", _add_kahan, auxiliary=(State("compensation", WEIGHT_ROLE),)),
        Mode("stochastic", _add_stochastic, dtypes=(torch.bfloat16, torch.float32)),
        Mode("nearest", _add_nearest),
    )
}
