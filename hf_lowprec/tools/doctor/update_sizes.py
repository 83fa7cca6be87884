r"""Sizes of an optimizer's updates, in units of its learning rate.

The update of a weight is `u = -lr·(r + wd·w)`, with the *direction* `r` and a decoupled weight decay `wd`. Directions
are predicted for gradients that are noise: independent from step to step, Gaussian, of constant variance.

**Adam, AdamW, StableAdamW**: `r = m̂/√v̂`. With step weights `a_k = (1-β1)·β1^(t-k)/(1-β1^t)`, which add up to 1,
`m̂ = Σ a_k·g_k`. For β2 near 1, `v̂` is the mean of all `g_k²`. A vector of Gaussian numbers has a uniform direction, so
`E[r²] = E[(Σ a_k·g_k)² / mean(g_k²)] = Σ a_k²`, exactly and for every `t`:

    ρ_t² = (1-β1)·(1+β1^t) / ((1+β1)·(1-β1^t))

It is 1 in the first step and `(1-β1)/(1+β1)` in the end: ρ = 0.23 for β1 = 0.9. From about the tenth step on, `r` is
close to Gaussian. `Σ_t r_t` over many steps has the variance of `Σ_t g_t/σ`: 1 per step. So directions persist: the
variance of the displacement is `1/ρ²` times what independent updates of that size would give.

**Adafactor** without `relative_step` and `scale_parameter`: the same, but with the final size from the first step, and
without `beta1` as for β1 = 0. The RMS of `r` is then 1, the limit above which it clips.

**Lion**: `r = sign(c)`, whose size is 1. `c = Σ w_k·g_(t-k)` with `w_0 = 1-β1` and `w_k = β1·(1-β2)·β2^(k-1)`. The
signs of two Gaussian numbers with correlation κ have correlation `(2/π)·asin(κ)`, which gives the persistence.

What real gradients add:

- Gradients that agree from step to step (large batches, the beginning of training) make `r` larger. 0.2 to 0.4 is usual
  (Liu et al., arXiv:2502.16982, section 2.2), up to 1 for small heads. Then updates vanish later than predicted.
- Gradients that shrink faster than `v̂` forgets (β2 = 0.999: a thousand steps) make `r` smaller, and a denominator in
  which `eps` counts as well. Then updates vanish earlier.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLE = 512
"""Directions in a sample."""
ADAMS = ("adam", "adamw", "stableadamw")
LION = "lion"
PREDICTED_ALGORITHMS = (*ADAMS, "adafactor", LION)
"""The algorithms whose updates have a size that does not depend on that of the gradients."""


class Directions(NamedTuple):
    """The directions of an optimizer's updates.

    Attributes:
        sample: absolute values of directions, equally likely, of both signs (FP64).
        beta1: the decay rate from which `growth` follows; 0 if directions have their final size from the first step.
        persistence: the variance of a sum of directions over many steps, per step, relative to that of a single one.
    """

    sample: Tensor
    beta1: float
    persistence: float

    def growth(self, steps: Tensor) -> Tensor:
        """The size of directions in each of `steps`, counted from 1, relative to that after many steps."""
        decayed = self.beta1**steps
        return ((1 + decayed) / (1 - decayed)).sqrt()


def noise_directions(algorithm: str, betas: tuple[float, float]) -> Directions:
    """The directions of an algorithm of `PREDICTED_ALGORITHMS` if gradients are noise."""
    if algorithm == LION:
        return Directions(torch.ones(1, dtype=torch.float64), 0.0, lion_persistence(*betas))
    size = adam_size(betas[0])
    return Directions(size * _half_normal_sample(), betas[0] if algorithm in ADAMS else 0.0, 1 / size**2)


def adam_size(beta1: float) -> float:
    """Root mean square of the directions of Adam after many steps, if gradients are noise."""
    return math.sqrt((1 - beta1) / (1 + beta1))


def lion_persistence(beta1: float, beta2: float) -> float:
    """`Directions.persistence` of Lion, if gradients are noise."""
    tail = beta1 * (1 - beta2)
    tail_square = tail**2 / (1 - beta2**2)
    variance = (1 - beta1) ** 2 + tail_square
    lags = torch.arange(1, 1 + math.ceil(40 / (1 - beta2)), dtype=torch.float64)
    correlation = ((1 - beta1) * tail * beta2 ** (lags - 1) + tail_square * beta2**lags) / variance
    return 1 + 2 * float((2 / math.pi * correlation.asin()).sum())


def _half_normal_sample() -> Tensor:
    """Absolute values of a standard normal variable at equally likely quantiles, of mean square 1."""
    quantiles = (torch.arange(SAMPLE, dtype=torch.float64) + 0.5) / SAMPLE
    values = math.sqrt(2) * torch.erfinv(quantiles)
    return values / values.square().mean().sqrt()
