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

**Kahan summation** rounds the compensation instead of the weight. The compensation is uniform within `s/2`, so its own
spacing is `s/512` for half of the weights, `s/1024` for a quarter, and so on. It is rounded like a weight of that
spacing: stochastically, or to nearest with `state_rounding="nearest"`.

**Split weights** are rounded as numbers of more bits are: with a remainder of `n` bits, their spacing is `s/2^n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import spacings_by_exponent
from hf_lowprec.tools.doctor.update_sizes import Directions
from hf_lowprec.tools.doctor.weight_spacings import magnitudes

COMPENSATION = ((2.0**-9, 0.5), (2.0**-10, 0.25), (2.0**-11, 0.125), (2.0**-12, 0.125))


class Storage(NamedTuple):
    """The storage of an update.

    Attributes:
        quanta: the spacing of what is rounded, relative to the weight's, and the share of weights that have it.
        stochastic: whether it is rounded stochastically, or to nearest.
    """

    quanta: tuple[tuple[float, float], ...]
    stochastic: bool


class RoundedUpdates(NamedTuple):
    """Sums over weights, for each of some steps (FP64).

    Attributes:
        square: `Σ u²`.
        stored: `Σ u·Δ`.
        noise: the sum of the variances that stochastic rounding adds.
        displacement: the sum of the variances that these updates add to the weights' displacement.
    """

    square: Tensor
    stored: Tensor
    noise: Tensor
    displacement: Tensor

    def __add__(self, other: RoundedUpdates) -> RoundedUpdates:  # type: ignore[override]
        return RoundedUpdates(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@torch.no_grad()
def round_updates(
    counts: Tensor,
    directions: Directions,
    learning_rates: Sequence[float],
    steps: Sequence[int],
    weight_decay: float,
    storage: Storage,
) -> RoundedUpdates:
    """Predict the rounding of weights' updates.

    Args:
        counts: how many weights have which spacing, see `count_spacings`; in rows, for several sets of weights.
        directions: of the updates.
        learning_rates: in each of `steps`.
        steps: counted from 1.
        weight_decay: decoupled, and part of the same update; 0 if it is a separate operation.
        storage: where updates are stored.

    Returns:
        Sums over the weights, of the shape of `counts` with steps in place of spacings.
    """
    rates = torch.tensor(learning_rates, dtype=torch.float64)[:, None]
    sample = directions.sample * directions.growth(torch.tensor(steps, dtype=torch.float64))[:, None]
    exponents = counts.reshape(-1, counts.shape[-1]).any(0).nonzero().flatten()
    rows = []
    tables = (spacings_by_exponent(torch.bfloat16), magnitudes())
    for spacing, magnitude in zip(*(table[exponents].tolist() for table in tables), strict=True):
        decay = weight_decay * magnitude
        updates = rates / spacing * (torch.cat((sample + decay, decay - sample), dim=1) if decay else sample)
        square = updates.square().mean(1)
        stored, noise = _round_for_storage(updates, square, storage)
        displacement = (rates / spacing * directions.sample).square().mean(1) * directions.persistence
        rows.append(torch.stack((square, stored, noise, displacement)) * spacing**2)
    table = torch.stack(rows) if rows else torch.zeros(0, 4, len(steps), dtype=torch.float64)
    return RoundedUpdates(*(counts[..., exponents] @ part for part in table.unbind(1)))


def _round_for_storage(updates: Tensor, square: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """`E[u·Δ]` and the variance of the noise of updates in units of the weight's spacing, for each row of `updates`."""
    stored, noise = torch.zeros_like(square), torch.zeros_like(square)
    for quantum, share in storage.quanta:
        fraction = updates / quantum
        if storage.stochastic:
            fraction -= fraction.floor()
            noise += share * quantum**2 * (fraction - fraction.square()).mean(1)
        else:
            stored += share * quantum * (updates * fraction.round()).mean(1)
    return (square, noise) if storage.stochastic else (stored, noise)
