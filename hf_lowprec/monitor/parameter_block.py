"""The parameters that are measured together, before a step and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import ExactUpdate, FusedGroupUpdates
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.replayed_update import ReplayedUpdates, agreement
from hf_lowprec.monitor.step_statistics import COLUMN, SLOPE_SUMS, SUMS, second_moment_sums, slope_sums
from hf_lowprec.optim.sharding import Sharding
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.spacing import spacing
from hf_lowprec.rounding.stored_pairs import dropped_bits, fp64_value


class ParameterBlock:
    """Parameters that are measured together: of one dtype, device and sharding, stepped by one formula.

    Attributes:
        exact: the exact update of the running step, if it is known.
        weight: the sampled weights before the step, if it is not.
        grad_seen: for each parameter, whether it has a gradient that is not zero.

    Args:
        rows: their rows in the monitor's tables.
        weights: this rank's shards.
        samples: their samples.
        sharding: over which ranks they are sharded.
        updates: computes exact updates; None if they are FP32, have no gradient, or it is not known how.
    """

    def __init__(
        self,
        rows: list[int],
        weights: Sequence[Tensor],
        samples: ParameterSamples,
        sharding: Sharding | None,
        updates: FusedGroupUpdates | ReplayedUpdates | None,
    ) -> None:
        self.rows = rows
        self.weights = list(weights)
        self.samples = samples
        self.sharding = sharding
        self.updates = updates
        self.exact: ExactUpdate | None = None
        self.weight: Tensor | None = None
        self.grad_seen: Tensor | None = None
        self._first: tuple[Tensor, Tensor | None] | None = None

    def look_for_gradients(self, grads: Sequence[Tensor | None], seen: Sequence[bool]) -> None:
        """Find out which parameters have a gradient, until each of them has had one."""
        if all(seen[row] for row in self.rows):
            return
        present = [grad for grad in grads if grad is not None]
        nonzero = self.samples.gather(present).any(dim=1)
        for k in (~nonzero).nonzero().flatten().tolist():
            if not seen[self.rows[k]]:  # a gradient may be zero wherever it is sampled, such as an embedding's
                nonzero[k] = present[k].any()
        self.grad_seen = nonzero.double()

    def agreement(self) -> Tensor:
        """How many updates can be compared with what the weights did, and how many agree."""
        assert self.exact is not None and self.updates is not None
        weight = self.samples.gather(self.weights, "weight")
        stored = fp64_value(weight, self.updates.compensation())
        return agreement(self.exact.update, stored - self.exact.stored, spacing(self.exact.weight, weight.dtype))

    def forget_update(self) -> None:
        """Keep only the weights of the running measurement."""
        assert self.exact is not None
        self.weight, self.exact = self.exact.weight, None

    def sums(self, first_weights: Mapping[int, Tensor], first_compensations: Mapping[int, Tensor]) -> Tensor:
        """The sums of the step that was taken.

        Args:
            first_weights: the samples of the weights when training began, by row.
            first_compensations: those of the compensations or remainders, as far as there are any.

        Returns:
            FP64 of shape (parameters, len(SUMS)).
        """
        samples = self.samples
        weights = samples.element_weights
        table = torch.zeros(len(self.rows), len(SUMS), dtype=torch.float64, device=weights.device)
        stored_weight = samples.gather(self.weights, "weight")
        compensation = None if self.updates is None else self.updates.compensation()
        table[:, COLUMN["elements"]] = torch.tensor(samples.sizes, dtype=torch.float64)
        table[:, COLUMN["never_moved"]] = self._never_moved(
            first_weights, first_compensations, stored_weight, compensation
        )
        table[:, COLUMN["never_moved"]] *= weights
        if self.grad_seen is not None:
            table[:, COLUMN["has_gradient"]] = self.grad_seen
        before = self.weight if self.exact is None else self.exact.weight
        if before is not None:
            table[:, COLUMN["stepped"]] = table[:, COLUMN["elements"]]
            table[:, COLUMN["changed"]] = (before != stored_weight).sum(1) * weights
        if self.exact is not None:
            self._add_slopes(table, self.exact, stored_weight, compensation)
        return table

    def _never_moved(
        self,
        first_weights: Mapping[int, Tensor],
        first_compensations: Mapping[int, Tensor],
        weight: Tensor,
        compensation: Tensor | None,
    ) -> Tensor:
        """How many sampled elements of each parameter are as they were when training began."""
        if self._first is None or (self._first[1] is None) != (compensation is None):
            first = torch.stack([first_weights[row] for row in self.rows])
            if compensation is None or not all(row in first_compensations for row in self.rows):
                self._first = first, compensation
            else:
                self._first = first, torch.stack([first_compensations[row] for row in self.rows])
        same = self._first[0] == weight
        if compensation is not None and self._first[1] is not None:
            same &= self._first[1] == compensation
        return (same & self.samples.valid).sum(1) if self.samples.is_padded else same.sum(1)

    def _add_slopes(
        self, table: Tensor, exact: ExactUpdate, stored_weight: Tensor, compensation: Tensor | None
    ) -> None:
        """Compare what is stored with the exact update."""
        samples = self.samples
        weights, size = samples.element_weights, len(SLOPE_SUMS)

        def valid(matrix: Tensor) -> Tensor:
            return torch.where(samples.valid, matrix, 0.0) if samples.is_padded else matrix

        def put(prefix: str, sums: Tensor) -> None:
            first = COLUMN[f"{prefix}_square"]
            table[:, first : first + size] = sums

        update = valid(exact.update)
        stored = fp64_value(stored_weight, compensation)
        ulp = spacing(exact.weight, stored_weight.dtype)
        if compensation is None:
            grid = ulp
        elif compensation.is_floating_point():
            grid = spacing(compensation, compensation.dtype)
        else:  # a remainder
            grid = spacing(exact.weight, torch.float32) * 2.0 ** dropped_bits(compensation)
        random_grid = grid if exact.random_weights else None
        put("update", slope_sums(update, stored - exact.stored, random_grid, weights))
        wide = exact.weight.double()
        table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(wide, wide) * weights
        if compensation is not None:
            # Of the weight after the step: near zero, one step may take a weight through many binades.
            kept_out = stored - stored_weight.double()
            ulps = kept_out / spacing(stored_weight, stored_weight.dtype)
            table[:, COLUMN["compensation_square"]] = torch.linalg.vecdot(ulps, ulps) * weights
            table[:, COLUMN["compensated"]] = table[:, COLUMN["elements"]]
        if exact.second_moment is not None and self.updates is not None:
            name, before, after = exact.second_moment
            stored_moment = self.updates.stored_state(name)
            moment_grid = exact.second_moment_spacing
            if stored_moment is not None and (moment_grid is not None or stored_moment.dtype in LOW_PRECISION_DTYPES):
                if moment_grid is None and exact.random_states:
                    moment_grid = spacing(before, stored_moment.dtype)
                put("second_moment", second_moment_sums(before, after, stored_moment.double(), moment_grid, weights))
        if exact.decay is not None and exact.stored_without_decay is not None:
            # Seen on the scale of the decay, even rounding to nearest is random: it depends on the rest of the update.
            arrived = valid(stored - exact.stored_without_decay)
            put("weight_decay", slope_sums(valid(exact.decay), arrived, grid, weights))
