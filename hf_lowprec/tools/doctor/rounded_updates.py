r"""Effects of rounding on updates of a given size: how much of them it loses, and how much noise it adds.

**Rounding to nearest** moves a stored weight of spacing `s` by `Δ = s·round(u/s)`. The lost share of updates is
`1 - E[u·Δ]/E[u²]`, as the training log has it. For Gaussian `u` of standard deviation σ, integration by parts gives

    lost = 1 - (s/σ)·√(2/π)·Σ_{j≥0} exp(-((j+½)·s/σ)²/2)

and by Stein's lemma a small drift inside of `u`, such as weight decay, loses the same share. Half is lost at σ = s/3.8.
Here the expectation is taken over a sample of directions, which need not be Gaussian.

**Stochastic rounding** loses nothing. Rounding `u` to a multiple of `s` adds noise of variance `s²·f·(1-f)`, where `f`
is the fractional part of `u/s`: about `s·|u|` for small updates. The noise of different steps is independent, so its
variances add up. So do those of the displacement that the updates themselves cause, `Σ_t E[u_t²]·persistence`. The
ratio of the two sums' roots is the *noise* of a run.

All of it depends on a weight's spacing alone, the distance to the next BF16 number, and that on its exponent. So a
histogram of 256 counts replaces a tensor.

**Split weights** are rounded as numbers of more bits are: with a remainder of `n` bits, their spacing is `s/2^n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent

CHUNK = 1 << 22
"""Elements that are converted at a time."""

_MANTISSA_BITS = 7


def magnitudes() -> Tensor:
    """The root mean square of the numbers with each exponent field, if they are uniform (FP64, 256 elements)."""
    return spacings_by_exponent(torch.bfloat16) * 2**_MANTISSA_BITS * (7 / 3) ** 0.5


def count_spacings(tensor: Tensor) -> Tensor:
    """Count the elements of a tensor by the spacing of the BF16 numbers around them.

    Below a power of two, such as the 1.0 of a new norm, numbers are twice as dense as above it; it counts half for each
    spacing. NaNs and infinities are left out.

    Args:
        tensor: any floating-point tensor; it is rounded to BF16 first.

    Returns:
        An FP64 tensor of 256 counts in the order of `spacings_by_exponent`.
    """
    counts = torch.zeros(2 * EXPONENTS, dtype=torch.int64)
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        bits = chunk.to(torch.bfloat16).view(torch.int16).int() & 0x7FFF
        is_power = (bits & 0x7F) == 0
        counts += torch.bincount((bits >> _MANTISSA_BITS) * 2 + is_power, minlength=2 * EXPONENTS).cpu()
    counts[-2:] = 0  # infinities and NaNs
    others, powers = counts.double().view(EXPONENTS, 2).unbind(1)
    below = powers / 2
    below[:2] = 0  # zero and the smallest normal number have the same spacing on both sides
    return others + powers - below + torch.cat((below[1:], below.new_zeros(1)))


class Directions(NamedTuple):
    """The directions of an optimizer's updates, whose sizes are in units of its learning rate.

    The update of a weight is `u = -lr·(r + wd·w)`, with the *direction* `r` and a decoupled weight decay `wd`.

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


class RoundedUpdates(NamedTuple):
    """Sums over weights, for each of some steps (FP64).

    Attributes:
        square: `Σ u²`.
        stored: `Σ u·Δ`.
        variance: the sum of the variances that stochastic rounding adds.
        displacement: the sum of the variances that these updates add to the weights' displacement.
    """

    square: Tensor
    stored: Tensor
    variance: Tensor
    displacement: Tensor

    @property
    def lost(self) -> float:
        """The lost share of all updates."""
        square = float(self.square.sum())
        return 1 - float(self.stored.sum()) / square if square else 0.0

    @property
    def noise(self) -> float:
        """Root mean square of the noise that rounding adds, relative to that of the displacement."""
        displacement = float(self.displacement.sum())
        return (float(self.variance.sum()) / displacement) ** 0.5 if displacement else 0.0

    def __add__(self, other: RoundedUpdates) -> RoundedUpdates:  # type: ignore[override]
        return RoundedUpdates(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@torch.no_grad()
def round_updates(
    counts: Tensor,
    directions: Directions,
    learning_rates: Sequence[float],
    steps: Sequence[int],
    weight_decay: float,
    quantum: float,
    stochastic: bool,
) -> RoundedUpdates:
    """Predict the rounding of weights' updates.

    Args:
        counts: how many weights have which spacing, see `count_spacings`.
        directions: of the updates.
        learning_rates: in each of `steps`.
        steps: counted from 1.
        weight_decay: decoupled, and part of the same update; 0 if it is a separate operation.
        quantum: the spacing of what is stored, relative to the weight's.
        stochastic: whether it is rounded stochastically, or to nearest.

    Returns:
        Sums over the weights, for each step.
    """
    rates = torch.tensor(learning_rates, dtype=torch.float64)[:, None]
    sample = directions.sample * directions.growth(torch.tensor(steps, dtype=torch.float64))[:, None]
    total = torch.zeros(4, len(steps), dtype=torch.float64)
    for count, spacing, magnitude in zip(counts, spacings_by_exponent(torch.bfloat16), magnitudes(), strict=True):
        if not count:
            continue
        decay, spacing = weight_decay * magnitude, spacing * quantum
        updates = rates / spacing * (torch.cat((sample + decay, decay - sample), dim=1) if decay else sample)
        square, variance = updates.square().mean(1), torch.zeros(len(steps), dtype=torch.float64)
        stored = square
        if stochastic:
            fraction = updates - updates.floor()
            variance = (fraction - fraction.square()).mean(1)
        else:
            stored = (updates * updates.round()).mean(1)
        displacement = (rates / spacing * directions.sample).square().mean(1) * directions.persistence
        total += count * spacing**2 * torch.stack((square, stored, variance, displacement))
    return RoundedUpdates(*total)
