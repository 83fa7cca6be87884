"""How far masters are from FP32's after 2000 steps on the same gradients: those of two other benchmarks.

`by_scale` takes the gradients of `states_in_8_bits.py`: scales of elements scatter, and shrink in half of them.
`by_mean` takes those of `state_rounding.py`, with its weights and weight decay. β₂ is 0.999 and ε 1e-8 in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import state_rounding
import states_in_8_bits
import torch
from states_in_8_bits import Case, slope_and_error
from torch import Tensor
from torch.nn import Parameter

from peers.candidates import BASELINE, CANDIDATES, Candidate

WIDTH = 64
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
CASES = [case for case in states_in_8_bits.CASES if case.beta2 == OPTIONS["betas"][1]]


class Displacement(NamedTuple):
    """Compared with FP32's.

    Attributes:
        slope: its component along FP32's, less one.
        error: the norm of the difference, relative to the norm of FP32's.
    """

    slope: float
    error: float


class _Run:
    """A tensor that is trained by one candidate."""

    def __init__(self, candidate: Candidate, start: Tensor, **options: float) -> None:
        self._candidate = candidate
        self._start = start
        self._param = Parameter(start.to(candidate.dtype, copy=True))
        self._optimizer = candidate.build([self._param], **OPTIONS, **options, **candidate.exact_start)

    def step(self, grad: Tensor) -> None:
        self._param.grad = grad.to(self._param.dtype, copy=True)  # optimi uses the gradient as a buffer
        self._optimizer.step()

    def displacement(self) -> Tensor:
        (master,) = self._candidate.masters(self._optimizer, [self._param])
        return master.double() - self._start.double()


def _runs(candidates: Sequence[Candidate], start: Tensor, **options: float) -> dict[str, _Run]:
    """By name; the baseline is always among them."""
    (baseline,) = (candidate for candidate in CANDIDATES if candidate.name == BASELINE)
    return {c.name: _Run(c, start, **options) for c in (baseline, *candidates)}


def by_scale(
    candidates: Sequence[Candidate], cases: Sequence[Case], elements: int, seed: int
) -> dict[str, list[Displacement]]:
    """Displacements by candidate, one for each case.

    Args:
        candidates: what is compared with FP32.
        cases: some of `CASES`, which are trained as one tensor.
        elements: of each case; a multiple of 256, so that no block belongs to two cases.
        seed: of gradients and of rounding.
    """
    torch.manual_seed(seed)
    start = torch.zeros(len(cases) * elements // WIDTH, WIDTH)
    runs = _runs(candidates, start, lr=states_in_8_bits.LR, weight_decay=0.0)
    for grads in states_in_8_bits.gradients(cases, (elements // WIDTH, WIDTH), seed):
        for run in runs.values():
            run.step(grads.view(-1, WIDTH))
    moved = {name: run.displacement().view(-1, elements) for name, run in runs.items()}
    return {candidate.name: _compared(moved[candidate.name], moved[BASELINE]) for candidate in candidates}


def by_mean(candidates: Sequence[Candidate], mean: float, elements: int, seed: int) -> dict[str, Displacement]:
    """Displacements by candidate.

    Args:
        candidates: what is compared with FP32.
        mean: standard deviation of the elements' means, as in `state_rounding.py`.
        elements: a multiple of 256.
        seed: of weights, gradients and rounding.
    """
    torch.manual_seed(seed)
    start, steps = state_rounding.gradients(seed, elements, mean)
    runs = _runs(candidates, start.float().view(-1, WIDTH), lr=state_rounding.LR, weight_decay=state_rounding.DECAY)
    for grad in steps:
        for run in runs.values():
            run.step(grad.view(-1, WIDTH))
    moved = {name: run.displacement().view(1, -1) for name, run in runs.items()}
    return {candidate.name: _compared(moved[candidate.name], moved[BASELINE])[0] for candidate in candidates}


def _compared(moved: Tensor, wanted: Tensor) -> list[Displacement]:
    """A displacement for each row."""
    return [Displacement(*pair) for pair in torch.stack(slope_and_error(moved, wanted), dim=1).tolist()]
