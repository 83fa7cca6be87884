"""The measurement of one step: blocks of parameters, sampled before the step and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import ExactUpdate, FusedGroupUpdates
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.step_precision import COLUMN, SLOPE_SUMS, SUMS, second_moment_sums, slope_sums
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import Sharding, local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import fp64_value
from hf_lowprec.rounding.nearest import spacing


class ParameterBlock:
    """Parameters that are measured together: of one dtype, device and sharding, stepped by one formula.

    Attributes:
        exact: the exact update of the running step, if it is known.
        nonzero_grad: for each parameter, 1 if its gradient is not zero, else 0; None if nobody looked.

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
        self.nonzero_grad: Tensor | None = None
        self._before: tuple[Tensor, Tensor] | None = None
        self._first: tuple[torch.dtype | None, Tensor] | None = None

    def look_for_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Find out which gradients are not zero, unless each parameter has had one before."""
        seen = self._watched.gradients.nonzero
        if all(seen[row] for row in self.rows):
            return
        present = [grad for grad in grads if grad is not None]
        nonzero = self.samples.gather(present).any(dim=1)
        for k in (~nonzero).nonzero().flatten().tolist():
            if not seen[self.rows[k]]:  # a gradient may be zero wherever it is sampled, such as an embedding's
                nonzero[k] = present[k].any()
        self.nonzero_grad = nonzero.double()

    def record_values(self, grads: Sequence[Tensor]) -> None:
        """Before a step whose updates are not known: record what is stored, and which elements have a gradient."""
        weight = self.samples.gather(self.weights, "weight")
        self._before = fp64_value(weight, self._low_bits()), self.samples.gather(grads) != 0

    def end_step(self) -> None:
        """Forget the step that was measured."""
        self.exact = self.nonzero_grad = self._before = None

    def sums(self) -> Tensor:
        """The sums of the step that was taken; FP64 of shape (parameters, len(SUMS))."""
        samples = self.samples
        weights = samples.element_weights
        table = torch.zeros(len(self.rows), len(SUMS), dtype=torch.float64, device=weights.device)
        stored_weight = samples.gather(self.weights, "weight")
        low_bits = self._low_bits()
        stored = fp64_value(stored_weight, low_bits)
        table[:, COLUMN["elements"]] = torch.tensor(samples.sizes, dtype=torch.float64, device=table.device)
        same = samples.clear_padding(stored == self._first_values(low_bits))
        table[:, COLUMN["never_moved"]] = same.sum(1) * weights
        if self.nonzero_grad is not None:
            table[:, COLUMN["has_gradient"]] = self.nonzero_grad
        if self._before is not None:
            before, has_gradient = self._before
            table[:, COLUMN["stepped"]] = has_gradient.sum(1) * weights
            table[:, COLUMN["changed"]] = (has_gradient & (stored != before)).sum(1) * weights
            table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(stored, stored) * weights
        if self.exact is not None:
            self._compare(table, self.exact, stored_weight, low_bits, stored)
        return table

    def _low_bits(self) -> Tensor | None:
        """Gather the compensations or remainders as they are stored now, if there are any."""
        shards = [shard for row in self.rows if (shard := self._watched.low_bits(row)) is not None]
        return self.samples.gather(shards, "low bits") if len(shards) == len(self.rows) else None

    def _first_values(self, low_bits: Tensor | None) -> Tensor:
        """The sampled weights when training began plus the first low bits of the present dtype, FP64."""
        dtype = None if low_bits is None else low_bits.dtype
        if self._first is None or self._first[0] != dtype:
            weights, known = self._watched.first_weights, self._watched.first_low_bits
            has_low_bits = low_bits is not None and all(row in known for row in self.rows)  # else they began at zero
            first = torch.stack([known[row] for row in self.rows]) if has_low_bits else None
            self._first = dtype, fp64_value(torch.stack([weights[row] for row in self.rows]), first)
        return self._first[1]

    def _compare(
        self, table: Tensor, exact: ExactUpdate, stored_weight: Tensor, low_bits: Tensor | None, stored: Tensor
    ) -> None:
        """Fill in what compares the exact update with `stored`, the sum of weight and low bits after the step."""
        samples, element_weights = self.samples, self.samples.element_weights

        def put(prefix: str, sums: Tensor) -> None:
            first = COLUMN[f"{prefix}_square"]
            table[:, first : first + len(SLOPE_SUMS)] = sums

        grid = _spacing_of_stored(exact.weight, stored_weight, low_bits)
        update, change = samples.clear_padding(exact.update), stored - exact.stored
        put("update", slope_sums(update, change, grid if exact.random_weights else None, element_weights))
        wide = exact.weight.double()
        table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(wide, wide) * element_weights
        if (moment := exact.second_moment) is not None and self.updates is not None:
            now, moment_grid = self.updates.stored_state(moment.name), moment.code_spacing
            if now is not None and (moment_grid is not None or now.dtype in LOW_PRECISION_DTYPES):
                if moment_grid is None and exact.random_states:
                    moment_grid = spacing(moment.before, now.dtype)
                moments = moment.before, moment.after, now.double()
                put("second_moment", second_moment_sums(*moments, moment_grid, element_weights))
        if exact.decay is not None and exact.stored_without_decay is not None:
            # Seen on the scale of the decay, even rounding to nearest is random: it depends on the rest of the update.
            decay, change = map(samples.clear_padding, (exact.decay, stored - exact.stored_without_decay))
            put("weight_decay", slope_sums(decay, change, grid, element_weights))


def _spacing_of_stored(weight: Tensor, stored_weight: Tensor, low_bits: Tensor | None) -> Tensor:
    """The spacing of the numbers that an update is rounded to."""
    if low_bits is None:
        return spacing(weight, stored_weight.dtype)
    if low_bits.is_floating_point():  # compensations
        return spacing(low_bits, low_bits.dtype)
    return spacing(weight, torch.float32)  # remainders


@dataclass
class MeasuredStep:
    """One measured step.

    Attributes:
        number: of the step.
        with_decay: whether the weight decay is measured.
        learning_rates: those of the parameter groups.
        gradients: which parameters have one, see `GradientRecord.present_now`.
        blocks: what is measured together.
        blocks_of_groups: the blocks of one of our optimizers, by fused group.
        stepped: rows of the parameters that one of our optimizers steps.
        results: the rows of each block with their sums, after the step.
        enabled: whether the step is taken, a bool scalar on its device; None is yes.
    """

    number: int
    with_decay: bool
    learning_rates: list[float | Tensor]
    gradients: list[bool]
    blocks: list[ParameterBlock] = field(default_factory=list)
    blocks_of_groups: dict[Any, ParameterBlock] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    results: list[tuple[list[int], Tensor]] = field(default_factory=list)
    enabled: Tensor | None = None


class MeasuredBlocks:
    """Divides the parameters of each measured step into blocks, which are kept for the next one while they fit.

    Args:
        optimizer: the optimizer.
        watched: its parameters.
        across_ranks: add up the numbers of sharded parameters over ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watched: WatchedParameters,
        across_ranks: bool,
    ) -> None:
        self._optimizer = optimizer
        self._watched = watched
        self._across_ranks = across_ranks
        self._blocks_of_last_step: dict[Any, ParameterBlock] = {}

    def clear(self) -> None:
        """Forget the blocks, which hold on to the tensors of a plan."""
        self._blocks_of_last_step.clear()

    def record_beginning(self) -> None:
        """Before the first step, let one of our optimizers create the states, and record what weights start with."""
        if isinstance(self._optimizer, LowPrecisionOptimizer):
            with self._optimizer.plan_step():
                self._watched.record_first_low_bits()

    def add_all(self, step: MeasuredStep) -> None:
        """Add all parameters before they are stepped, and compute their exact updates if the optimizer is ours."""
        if isinstance(self._optimizer, LowPrecisionOptimizer):
            with self._optimizer.plan_step() as plan:
                self._optimizer.prepare_step(plan)
                self.add_plan(plan, step)
        self.add_rest(step)

    def add_plan(self, plan: StepPlan, step: MeasuredStep) -> None:
        """Add the parameters of a plan to `step`, and compute their exact updates. `prepare_step` was called for it."""
        assert isinstance(self._optimizer, LowPrecisionOptimizer)
        for backend_step in plan.backend_steps:
            fused_group = backend_step.fused_group
            rows = [self._watched.row[entry.param] for entry in fused_group.entries]
            step.stepped.update(rows)
            block = self._blocks_of_last_step.get(fused_group)
            if block is None:
                self._watched.record_first_low_bits(rows)
                samples = ParameterSamples(fused_group.weights, self._watched.sample_size)
                measures_updates = fused_group.spec.param_dtype in LOW_PRECISION_DTYPES
                updates = FusedGroupUpdates(self._optimizer, backend_step, samples) if measures_updates else None
                block = ParameterBlock(self._watched, rows, fused_group.weights, samples, fused_group.sharding, updates)
            if block.updates is not None:
                block.exact = block.updates.compute(step.with_decay)
            block.look_for_gradients([entry.grad for entry in fused_group.entries])
            step.blocks.append(block)
            step.blocks_of_groups[fused_group] = block
            if fused_group.enabled is not None:
                step.enabled = fused_group.enabled

    def add_rest(self, step: MeasuredStep) -> None:
        """Add the parameters that are in no plan: those without gradient, and all those of another library."""
        self._blocks_of_last_step = step.blocks_of_groups
        params, is_ours = self._watched.params, isinstance(self._optimizer, LowPrecisionOptimizer)
        rest = [row for row in range(len(params)) if row not in step.stepped]
        self._watched.record_first_low_bits(rest)
        grads = {row: None if is_ours else params[row].grad for row in rest}
        low_bits_dtypes = {row: _dtype(self._watched.low_bits(row)) for row in rest}
        grad_dtypes = {row: _dtype(grad) for row, grad in grads.items()}
        for rows in self._watched.divide(rest, low_bits_dtypes, grad_dtypes):
            weights = [local_shard(params[row]) for row in rows]
            samples = ParameterSamples(weights, self._watched.sample_size)
            block = ParameterBlock(self._watched, rows, weights, samples, sharding_of(params[rows[0]]), None)
            present = [local_shard(grad) for row in rows if (grad := grads[row]) is not None]
            if present:  # then in all of these rows
                block.look_for_gradients(present)
                if weights[0].dtype in LOW_PRECISION_DTYPES:
                    block.record_values(present)
            step.blocks.append(block)

    def sum_up(self, step: MeasuredStep) -> None:
        """Compare what the step has changed with the exact updates."""
        for block in step.blocks:
            sums = block.sums()
            if self._across_ranks:
                sum_over_shards(sums, block.sharding)
            step.results.append((block.rows, sums))
            block.end_step()


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
