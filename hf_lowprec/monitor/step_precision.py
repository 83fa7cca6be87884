"""The result of a measurement: the precision of one optimizer step, by kind of parameter and by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lowprec.monitor.step_statistics import LOST_SHARES, precision_columns, precision_values
from hf_lowprec.monitor.tensor_names import PARAMETER_KINDS
from hf_lowprec.optim.cached_property import cached_property

ALL = "all"
"""The name, among the kinds, of the whole model."""

NUMBERS = (
    *LOST_SHARES,
    *(f"{name}_error" for name in LOST_SHARES),
    *("never_moved", "compensation_ulps", "update_to_weight", "changed"),
)
"""The names of all numbers."""


class StepPrecision:
    """The precision of one optimizer step, measured on a sample of the weights.

    | name | meaning |
    | --- | --- |
    | `lost_updates` | share of the weight changes that rounding lost: 0 none, 1 all |
    | `lost_second_moment` | share of the decay of second moments that rounding lost |
    | `lost_weight_decay` | share of the weight decay that rounding lost, over the last measurements |
    | `never_moved` | share of weights whose value, low bits included, is what it was when training began |
    | `compensation_ulps` | root mean square of the compensation, in spacings of the weight |
    | `update_to_weight` | root mean square of the update over that of the weight |
    | `changed` | with an optimizer of another library: share of the weights with a gradient that the step changed |

    The first three have a standard error each, such as `lost_updates_error`. Numbers that do not apply are absent.

    Attributes:
        step: the number of the step.
        sums: FP64 of shape (tensors, sums) on the CPU, see `step_statistics.SUMS`.
        names: the tensors' names.
        kinds: their kinds, see `parameter_kinds`.
        learning_rate: the largest learning rate of the step; None if the optimizer has none.
    """

    def __init__(
        self,
        step: int,
        sums: Tensor,
        names: Sequence[str],
        kinds: Sequence[str],
        learning_rate: float | None = None,
    ) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self.sums = sums
        self.names = names
        self.kinds = kinds

    @cached_property
    def by_kind(self) -> dict[str, dict[str, float]]:
        """The numbers by name, for each kind that the model has, and for `"all"` of it."""
        kinds = [kind for kind in PARAMETER_KINDS if kind in self.kinds]
        table = torch.zeros(len(kinds) + 1, self.sums.shape[1], dtype=torch.float64)
        index = torch.tensor([kinds.index(kind) + 1 for kind in self.kinds], dtype=torch.int64)
        table.index_add_(0, index, self.sums)
        table[0] = self.sums.sum(0)
        return dict(zip([ALL, *kinds], precision_values(table), strict=True))

    @cached_property
    def by_tensor(self) -> dict[str, dict[str, float]]:
        """The numbers by name, for each tensor."""
        return dict(zip(self.names, precision_values(self.sums), strict=True))

    def values_of(self, rows: Sequence[int]) -> dict[str, float]:
        """The numbers by name, for some of the tensors together."""
        return precision_values(self.sums[list(rows)].sum(0, keepdim=True))[0]

    def worst(self, name: str, count: int) -> list[tuple[str, float]]:
        """The tensors with the largest values of a number, such as `lost_updates`, largest first."""
        column = self._columns[name]
        known = np.flatnonzero(np.isfinite(column))
        order = known[np.argsort(-column[known], kind="stable")[:count]]
        return [(self.names[row], float(column[row])) for row in order.tolist()]

    @cached_property
    def _columns(self) -> dict[str, Any]:
        """Every number of all tensors."""
        return precision_columns(self.sums)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.3g}" for name, value in self.by_kind[ALL].items())
        return f"StepPrecision(step={self.step}, {numbers})"


def sum_over_steps(measured: Sequence[StepPrecision]) -> StepPrecision:
    """The precision of several steps of one run as a whole; its step and learning rate are the last one's.

    Raises:
        ValueError: no step was measured.
    """
    if not measured:
        raise ValueError("no step was measured")
    last = measured[-1]
    return StepPrecision(
        last.step, torch.stack([one.sums for one in measured]).sum(0), last.names, last.kinds, last.learning_rate
    )
