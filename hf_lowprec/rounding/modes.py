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
        averages: whether it averages or accumulates, so that in BF16 it needs unbiased rounding. What is only ever
            set to a value is rounded to nearest.
    """

    name: str
    role: int
    averages: bool = True


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
