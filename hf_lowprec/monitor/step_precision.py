"""The numbers of one optimizer step, as sums over the sampled elements of each tensor.

With `u` the change of a weight that the algorithm computed, and `Δ` the change of what is stored of it (the weight,
plus the compensation if it has one), `Σ u·Δ / Σ u²` is the share of the changes that is stored. It is the slope of a
regression of `Δ` on `u` without intercept. With error feedback, `u` includes what the momentum pays back. A lost share
has two standard errors, of which the larger one is reported:

- The observed one: the error of the slope, whose residuals `e = Δ - u` have no common variance: `√Σ u²e² / Σ u²`.
- The one that unbiased rounding would have: it rounds `u` to a neighbour at a distance of up to one spacing `s`, with
  variance `s²·f·(1-f)` where `f` is the fractional part of `u/s`. If all updates are far below the spacing, a sample
  may contain no weight that moves, and then the observed variance is zero although rounding is random. Where rounding
  is known not to be random, this error is left out.

Sums are FP64. A sampled element stands for `W` elements of its tensor, so that sums over the tensors of a model, and
over the shards of a tensor, are estimates for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_lowprec.once import cached_property
from hf_lowprec.tensor_names import PARAMETER_KINDS

SHARE_SUMS = ("square", "product", "seen_variance", "unbiased_variance")
"""The sums of `share_sums`, in its order."""
SUMS = (
    *("elements", "never_moved", "has_gradient"),
    *("stepped", "changed", "weight_square"),
    *(f"update_{name}" for name in SHARE_SUMS),
    *(f"second_moment_{name}" for name in SHARE_SUMS),
    *(f"weight_decay_{name}" for name in SHARE_SUMS),
)
"""The columns of a table of sums, which has one row for each tensor.

- elements: the number of elements; never_moved: the number whose value is the same as when training began;
- has_gradient: 1 if the gradient exists and is not zero, checked until it was so once; else 0;
- stepped: elements with a gradient that were stepped by an unknown update; changed: those of them that changed;
- weight_square: the squares of the weights that were stepped;
- update, second_moment, weight_decay: see `share_sums`.
"""
COLUMN = {name: k for k, name in enumerate(SUMS)}

LOST_SHARES = {"lost_updates": "update", "lost_second_moment": "second_moment", "lost_weight_decay": "weight_decay"}
"""The lost shares, with the prefix of their sums. The error of each has its name plus `_error`."""


def share_sums(exact: Tensor, stored: Tensor, grid: Tensor | None, elements_per_sample: Tensor) -> Tensor:
    """Return the sums from which a lost share and its errors follow.

    Args:
        exact: the exact changes `u`, FP64 of shape (tensors, sample).
        stored: the stored changes `Δ`.
        grid: the spacing of what is stored; None if rounding is not random.
        elements_per_sample: how many elements each sampled one stands for, FP64 of shape (tensors).

    Returns:
        FP64 of shape (tensors, 4), in the order of `SHARE_SUMS`.
    """
    square = exact * exact
    variance = None if grid is None else square * unbiased_variance(exact, grid)
    return _sums_of_shares(square, exact * stored, variance, elements_per_sample)


def _sums_of_shares(exact: Tensor, stored: Tensor, variance: Tensor | None, elements_per_sample: Tensor) -> Tensor:
    """Return the sums of a share `Σ stored / Σ exact`; unbiased rounding would give `stored` this variance."""
    sums = (
        exact.sum(1) * elements_per_sample,
        stored.sum(1) * elements_per_sample,
        (stored - exact).square_().sum(1) * elements_per_sample**2,
        torch.zeros_like(elements_per_sample) if variance is None else variance.sum(1) * elements_per_sample**2,
    )
    return torch.stack(sums, dim=1)


def unbiased_variance(change: Tensor, grid: Tensor) -> Tensor:
    """Return the variance of a stored change that is rounded to one of its two neighbours without bias."""
    steps = change.abs() / grid
    fraction = steps - steps.floor()
    return grid * grid * (fraction * (1 - fraction))


def second_moment_sums(
    before: Tensor, exact: Tensor, stored: Tensor, grid: Tensor | None, elements_per_sample: Tensor
) -> Tensor:
    """Return `share_sums` for relative changes of decaying second moments; the slope is the mean `Δv/v` over `dv/v`.

    Args:
        before: the second moments before the step, FP64 of shape (tensors, sample).
        exact: the second moments that the algorithm computed.
        stored: the second moments stored after the step.
        grid: their spacing; None if rounding is not random.
        elements_per_sample: as for `share_sums`.

    Returns:
        FP64 of shape (tensors, 4). Every element counts the same, so `square` holds the sum of `dv/v`, and `product`
        the sum of `Δv/v`.
    """
    decays = (exact < before) & (before > 0)
    scale = torch.where(decays, before, torch.inf).reciprocal()
    change = torch.where(decays, exact - before, 0.0)
    variance = None if grid is None else unbiased_variance(change, grid) * scale.square()
    return _sums_of_shares(change * scale, (stored - before) * scale, variance, elements_per_sample)


def precision_values(sums: Tensor) -> list[dict[str, float]]:
    """Compute the numbers of a step from a table of sums.

    Args:
        sums: FP64 of shape (rows, len(SUMS)), on the CPU.

    Returns:
        The numbers of each row by name, without those that are not finite or do not apply.
    """
    column = {name: sums[:, k] for name, k in COLUMN.items()}
    values: dict[str, Tensor] = {}  # NaN or infinite where a number does not apply
    for name, prefix in LOST_SHARES.items():
        square, product, seen, unbiased = (column[f"{prefix}_{part}"] for part in SHARE_SUMS)
        values[name] = 1 - product / square
        values[f"{name}_error"] = torch.maximum(seen, unbiased).sqrt() / square.abs()
    known = torch.where(column["stepped"] > 0, math.nan, column["update_square"])
    values["update_to_weight"] = torch.sqrt(known / column["weight_square"])
    values["never_moved"] = column["never_moved"] / column["elements"]
    values["changed"] = column["changed"] / column["stepped"]
    rows = zip(*(value.tolist() for value in values.values()), strict=True)
    return [{name: value for name, value in zip(values, row, strict=True) if math.isfinite(value)} for row in rows]


ALL = "all"
"""The name, among the kinds, of the whole model."""


@dataclass(eq=False, repr=False)
class StepPrecision:
    """The precision of one optimizer step, measured on a sample of the weights.

    | name | meaning |
    | --- | --- |
    | `lost_updates` | share of the weight changes that rounding lost: 0 none, 1 all |
    | `lost_second_moment` | share of the decay of second moments that rounding lost |
    | `lost_weight_decay` | share of the weight decay that rounding lost, over the last measurements |
    | `never_moved` | share of weights whose value, low bits included, is the same as when training began |
    | `update_to_weight` | root mean square of the update, error feedback included, over that of the weight |
    | `changed` | with an optimizer of another library: share of the weights with a gradient that the step changed |

    Each of the first three has a standard error, such as `lost_updates_error`. Numbers that do not apply are absent.

    Attributes:
        step: the number of the step.
        sums: FP64 of shape (tensors, sums) on the CPU, see `SUMS`.
        names: the tensors' names.
        kinds: their kinds, see `parameter_kinds`.
        learning_rate: the largest learning rate of the step; None if the optimizer has none.
        dtypes: the tensors' dtypes.
    """

    step: int
    sums: Tensor
    names: Sequence[str]
    kinds: Sequence[str]
    learning_rate: float | None = None
    dtypes: Sequence[torch.dtype] = ()

    @cached_property
    def by_kind(self) -> dict[str, dict[str, float]]:
        """The numbers by name, for each kind of parameter in the model, and for `"all"`."""
        kinds = [kind for kind in PARAMETER_KINDS if kind in self.kinds]
        table = torch.zeros(len(kinds) + 1, self.sums.shape[1], dtype=torch.float64, device=self.sums.device)
        index = torch.tensor([kinds.index(kind) + 1 for kind in self.kinds], dtype=torch.int64, device=self.sums.device)
        table.index_add_(0, index, self.sums)
        table[0] = self.sums.sum(0)
        return dict(zip([ALL, *kinds], precision_values(table), strict=True))

    @cached_property
    def by_tensor(self) -> dict[str, dict[str, float]]:
        """The numbers by name, for each tensor."""
        return dict(zip(self.names, precision_values(self.sums), strict=True))

    def values_of(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the numbers by name, for some of the tensors together."""
        return precision_values(self.sums[list(rows)].sum(0, keepdim=True))[0]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.3g}" for name, value in self.by_kind[ALL].items())
        return f"StepPrecision(step={self.step}, {numbers})"


def sum_over_steps(measured: Sequence[StepPrecision]) -> StepPrecision:
    """Return the precision of several steps of one run as a whole; its step and learning rate are the last one's."""
    return replace(measured[-1], sums=torch.stack([precision.sums for precision in measured]).sum(0))
