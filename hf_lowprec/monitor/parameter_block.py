"""The parameters that are measured together, before a step and after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import ExactUpdate, FusedGroupUpdates
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.step_statistics import COLUMN, SLOPE_SUMS, SUMS, second_moment_sums, slope_sums
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.optim.sharding import Sharding
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import dropped_bits, fp64_value
from hf_lowprec.rounding.nearest import spacing


class ParameterBlock:
    """Parameters that are measured together: of one dtype, device and sharding, stepped by one formula.

    Attributes:
        exact: the exact update of the running step, if it is known.
        grad_seen: for each parameter, whether it has a gradient that is not zero.

    Args:
        watched: all parameters.
        rows: the rows of this block's.
        weights: this rank's shards.
        samples: their samples.
        sharding: over which ranks they are sharded.
        updates: computes exact updates; None if they are FP32, have no gradient, or another library steps them.
    """

    def __init__(
        self,
        watched: WatchedParameters,
        rows: list[int],
        weights: Sequence[Tensor],
        samples: ParameterSamples,
        sharding: Sharding | None,
        updates: FusedGroupUpdates | None,
    ) -> None:
        self._watched = watched
        self.rows = rows
        self.weights = list(weights)
        self.samples = samples
        self.sharding = sharding
        self.updates = updates
        self.exact: ExactUpdate | None = None
        self.grad_seen: Tensor | None = None
        self._before: tuple[Tensor, Tensor] | None = None
        self._first: tuple[torch.dtype | None, Tensor] | None = None

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

    def record_values(self, grads: Sequence[Tensor]) -> None:
        """Before a step whose updates are not known: record what is stored, and which elements have a gradient."""
        weight = self.samples.gather(self.weights, "weight")
        self._before = fp64_value(weight, self._low_bits()), self.samples.gather(grads) != 0

    def end_step(self) -> None:
        """Forget the step that was measured."""
        self.exact = self.grad_seen = self._before = None

    def sums(self) -> Tensor:
        """The sums of the step that was taken; FP64 of shape (parameters, len(SUMS))."""
        samples = self.samples
        weights = samples.element_weights
        table = torch.zeros(len(self.rows), len(SUMS), dtype=torch.float64, device=weights.device)
        stored_weight = samples.gather(self.weights, "weight")
        low_bits = self._low_bits()
        stored = fp64_value(stored_weight, low_bits)
        table[:, COLUMN["elements"]] = torch.tensor(samples.sizes, dtype=torch.float64)
        same = stored == self._first_values(low_bits)
        table[:, COLUMN["never_moved"]] = (same & samples.valid if samples.is_padded else same).sum(1) * weights
        if self.grad_seen is not None:
            table[:, COLUMN["has_gradient"]] = self.grad_seen
        if self._before is not None:
            before, has_gradient = self._before
            table[:, COLUMN["stepped"]] = has_gradient.sum(1) * weights
            table[:, COLUMN["changed"]] = (has_gradient & (stored != before)).sum(1) * weights
            table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(stored, stored) * weights
        if self.exact is not None:
            self._add_slopes(table, self.exact, stored_weight, low_bits, stored)
        return table

    def _low_bits(self) -> Tensor | None:
        """Gather the compensations or remainders as they are stored now, if there are any."""
        shards = [shard for row in self.rows if (shard := self._watched.low_bits(row)) is not None]
        return self.samples.gather(shards, "low bits") if len(shards) == len(self.rows) else None

    def _first_values(self, low_bits: Tensor | None) -> Tensor:
        """The values of the sampled elements when training began, with low bits like those that they have now, FP64."""
        dtype = None if low_bits is None else low_bits.dtype
        if self._first is None or self._first[0] != dtype:
            weights, known = self._watched.first_weights, self._watched.first_low_bits
            has_low_bits = low_bits is not None and all(row in known for row in self.rows)  # else they began at zero
            first = torch.stack([known[row] for row in self.rows]) if has_low_bits else None
            self._first = dtype, fp64_value(torch.stack([weights[row] for row in self.rows]), first)
        return self._first[1]

    def _add_slopes(
        self, table: Tensor, exact: ExactUpdate, stored_weight: Tensor, low_bits: Tensor | None, stored: Tensor
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
        ulp = spacing(exact.weight, stored_weight.dtype)
        if low_bits is None:
            grid = ulp
        elif low_bits.is_floating_point():
            grid = spacing(low_bits, low_bits.dtype)
        else:  # a remainder
            grid = spacing(exact.weight, torch.float32) * 2.0 ** dropped_bits(low_bits)
        random_grid = grid if exact.random_weights else None
        put("update", slope_sums(update, stored - exact.stored, random_grid, weights))
        wide = exact.weight.double()
        table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(wide, wide) * weights
        if low_bits is not None:
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
