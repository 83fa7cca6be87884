"""How far masters are from FP32's after 2000 steps on the same gradients: those of two other benchmarks.

`by_scale` takes the gradients of `states_in_8_bits.py`: scales of elements scatter, and shrink in half of them.
`by_mean` takes those of `state_rounding.py`, with its weights and weight decay. ε is that of AdamW by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import state_rounding
import states_in_8_bits
import torch
from peers.candidates import BASELINE, CANDIDATES, FP32, Candidate
from states_in_8_bits import Case, slope_and_error
from torch import Tensor
from torch.nn import Parameter

WIDTH = 64
EPS = 1e-8


class Displacement(NamedTuple):
    """Compared with FP32's.

    Attributes:
        slope: its component along FP32's, less one.
        error: the norm of the difference, relative to the norm of FP32's.
    """

    slope: float
    error: float


class _Run:
    """Tensors that are trained by one candidate, each by an optimizer of its own: not all have groups of `betas`."""

    def __init__(
        self, candidate: Candidate, starts: Sequence[Tensor], betas: Sequence[tuple[float, float]], **options: float
    ) -> None:
        self._candidate = candidate
        self._starts = starts
        self._params = [Parameter(start.to(candidate.dtype, copy=True)) for start in starts]
        self._optimizers = [
            candidate.build([param], betas=pair, eps=EPS, **options, **candidate.exact_start)
            for param, pair in zip(self._params, betas, strict=True)
        ]

    def step(self, grads: Sequence[Tensor]) -> None:
        # A copy for each: optimi uses gradients as a buffer.
        for param, optimizer, grad in zip(self._params, self._optimizers, grads, strict=True):
            param.grad = grad.to(param.dtype, copy=True)
            optimizer.step()

    def displacements(self) -> list[Tensor]:
        """FP64, one for each tensor."""
        masters = [
            self._candidate.masters(optimizer, [param])[0]
            for param, optimizer in zip(self._params, self._optimizers, strict=True)
        ]
        return [master.double() - start.double() for master, start in zip(masters, self._starts, strict=True)]


def _with_baseline(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in CANDIDATES if c.name == BASELINE] + [c for c in candidates if c.name != BASELINE]


def by_scale(
    candidates: Sequence[Candidate], cases: Sequence[Case], elements: int, seed: int
) -> dict[str, list[Displacement]]:
    """Displacements by candidate, one for each case.

    Args:
        candidates: what is compared with FP32.
        cases: as in `states_in_8_bits.py`. Those of equal β₂ are trained as one tensor.
        elements: of each case; a multiple of `WIDTH`.
        seed: of gradients and of rounding.
    """
    betas = sorted({case.beta2 for case in cases})
    rows = [torch.tensor([k for k, case in enumerate(cases) if case.beta2 == beta]) for beta in betas]
    starts = [torch.zeros(len(row) * elements // WIDTH, WIDTH) for row in rows]
    pairs = [(states_in_8_bits.BETA1, beta) for beta in betas]
    torch.manual_seed(seed)
    runs = {
        c.name: _Run(c, starts, pairs, lr=states_in_8_bits.LR, weight_decay=0.0) for c in _with_baseline(candidates)
    }
    for grads in states_in_8_bits.gradients(cases, (elements // WIDTH, WIDTH), seed):
        parts = [grads[row].reshape(-1, WIDTH) for row in rows]
        for run in runs.values():
            run.step(parts)

    def by_case(run: _Run) -> Tensor:
        moved = torch.cat([part.view(-1, elements) for part in run.displacements()])
        return moved[torch.cat(rows).argsort()]

    wanted = by_case(runs[BASELINE])
    return {
        c.name: [
            Displacement(*pair)
            for pair in torch.stack(slope_and_error(by_case(runs[c.name]), wanted), dim=1).tolist()
        ]
        for c in candidates
    }


def by_mean(candidates: Sequence[Candidate], mean: float, elements: int, seed: int) -> dict[str, Displacement]:
    """Displacements by candidate.

    Args:
        candidates: what is compared with FP32.
        mean: standard deviation of the elements' means, as in `state_rounding.py`.
        elements: a multiple of `WIDTH`.
        seed: of weights, gradients and rounding.
    """
    start, steps = state_rounding.gradients(seed, elements, mean)
    starts = [start.to(FP32).view(-1, WIDTH)]
    options = {"lr": state_rounding.LR, "weight_decay": state_rounding.DECAY}
    torch.manual_seed(seed)
    runs = {c.name: _Run(c, starts, [(0.9, 0.999)], **options) for c in _with_baseline(candidates)}
    for grad in steps:
        for run in runs.values():
            run.step([grad.view(-1, WIDTH)])
    moved = {name: run.displacements()[0].view(1, -1) for name, run in runs.items()}
    found = {}
    for candidate in candidates:
        slope, error = slope_and_error(moved[candidate.name], moved[BASELINE])
        found[candidate.name] = Displacement(slope.item(), error.item())
    return found
