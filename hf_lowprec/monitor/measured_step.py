"""The measurement of one step: blocks of parameters, sampled before the step and after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import FusedGroupUpdates
from hf_lowprec.monitor.step_precision import COLUMN, SUMS
from hf_lowprec.monitor.watched_parameters import ParameterSamples, WatchedParameters
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradients.collector import collector_of
from hf_lowprec.optim.sharding import local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.rounding.low_bits import fp64_value


class ParameterBlock:
    """Parameters that are measured together: of one dtype, device and sharding, stepped by one formula.

    Attributes:
        rows: the rows of the parameters.
        samples: their samples.
        sharding: the ranks over which they are sharded.
        updates: the exact updates; None if the parameters are FP32 or have no gradient, or another library steps them.

    Args:
        watched: all parameters.
        rows: the rows of this block's parameters.
        weights: this rank's shards.
    """

    def __init__(self, watched: WatchedParameters, rows: list[int], weights: list[Tensor]) -> None:
        self._watched = watched
        self.rows = rows
        self._weights = weights
        self.samples = ParameterSamples(weights, watched.sample_size)
        self.sharding = sharding_of(watched.params[rows[0]])
        self.updates: FusedGroupUpdates | None = None
        self._nonzero_grad: Tensor | None = None  # None if not checked
        self._before: tuple[Tensor, Tensor] | None = None
        self._first: tuple[torch.dtype | None, Tensor] | None = None

    def look_for_gradients(self, grads: list[Tensor]) -> None:
        """Find out which gradients are not zero, unless each parameter has had a nonzero one before."""
        seen = [self._watched.gradients.rows[row].nonzero for row in self.rows]
        if all(seen):
            return
        nonzero = self.samples.gather(grads).any(dim=1)
        for k in (~nonzero).nonzero().flatten().tolist():
            if not seen[k]:  # a gradient may be zero wherever it is sampled, such as an embedding's
                nonzero[k] = grads[k].any()
        self._nonzero_grad = nonzero.double()

    def record_values(self, grads: list[Tensor]) -> None:
        """Record, before a step with unknown updates, what is stored and which elements have a gradient."""
        weight = self.samples.gather(self._weights, "weight")
        self._before = fp64_value(weight, self._low_bits()), self.samples.gather(grads) != 0

    def finish_step(self) -> Tensor:
        """Return the sums of the finished step, FP64 of shape (parameters, len(SUMS)), and forget the step."""
        per_sample = self.samples.elements_per_sample
        table = torch.zeros(len(self.rows), len(SUMS), dtype=torch.float64, device=per_sample.device)
        stored_weight, low_bits = self.samples.gather(self._weights, "weight"), self._low_bits()
        stored = fp64_value(stored_weight, low_bits)
        table[:, COLUMN["elements"]] = torch.tensor(self.samples.sizes, dtype=torch.float64, device=table.device)
        same = self.samples.clear_padding(stored == self._first_values(low_bits))
        table[:, COLUMN["never_moved"]] = same.sum(1) * per_sample
        if self._nonzero_grad is not None:
            table[:, COLUMN["has_gradient"]] = self._nonzero_grad
        if self._before is not None:
            before, has_gradient = self._before
            table[:, COLUMN["stepped"]] = has_gradient.sum(1) * per_sample
            table[:, COLUMN["changed"]] = (has_gradient & (stored != before)).sum(1) * per_sample
            table[:, COLUMN["weight_square"]] = torch.linalg.vecdot(stored, stored) * per_sample
        if self.updates is not None:
            self.updates.compare(table, stored_weight, low_bits)
        self._nonzero_grad = self._before = None
        return table

    def _low_bits(self) -> Tensor | None:
        """Gather the compensations or remainders as they are stored now, if there are any."""
        shards = [shard for row in self.rows if (shard := self._watched.low_bits(row)) is not None]
        return self.samples.gather(shards, "low bits") if len(shards) == len(self.rows) else None

    def _first_values(self, low_bits: Tensor | None) -> Tensor:
        """Return the sampled weights when training began plus the first low bits of the present dtype, FP64."""
        dtype = None if low_bits is None else low_bits.dtype
        if self._first is None or self._first[0] != dtype:
            weights, known = self._watched.first_weights, self._watched.first_low_bits
            has_low_bits = low_bits is not None and all(row in known for row in self.rows)  # else they began at zero
            first = torch.stack([known[row] for row in self.rows]) if has_low_bits else None
            self._first = dtype, fp64_value(torch.stack([weights[row] for row in self.rows]), first)
        return self._first[1]


class MeasuredStep:
    """One step, measured block by block: the blocks are added before the step, and summed up after it.

    Attributes:
        number: the number of the step.
        with_decay: whether the weight decay is measured.
        learning_rates: the learning rates of the param groups.
        gradients: which parameters have one, see `GradientRecord.present_now`.
        blocks: the parameters that are measured together.
        fused_blocks: the blocks of one of our optimizers, by fused group.
        stepped: rows of the parameters that one of our optimizers steps.
        sums: the rows of each block with their sums, after the step.
        enabled: whether the step is taken, a bool scalar on its device; None means yes.

    Args:
        watched: the optimizer's parameters.
        number: see above.
        with_decay: see above.
        earlier_blocks: the `fused_blocks` of an earlier step, which are used again where they fit.
    """

    def __init__(
        self, watched: WatchedParameters, number: int, with_decay: bool, earlier_blocks: dict[Any, ParameterBlock]
    ) -> None:
        self._optimizer = optimizer = watched.optimizer
        self._watched = watched
        self._earlier_blocks = earlier_blocks
        self.number = number
        self.with_decay = with_decay
        rates = [rate for group in optimizer.param_groups if (rate := group.get("lr")) is not None]
        self.learning_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self.gradients = watched.gradients.present_now(collector_of(optimizer))
        self.blocks: list[ParameterBlock] = []
        self.fused_blocks: dict[Any, ParameterBlock] = {}
        self.stepped: set[int] = set()
        self.sums: list[tuple[list[int], Tensor]] = []
        self.enabled: Tensor | None = None

    def add_all(self) -> None:
        """Add all parameters before they are stepped, and compute their exact updates if the optimizer is ours."""
        if isinstance(self._optimizer, LowPrecisionOptimizer):
            with self._optimizer.plan_step() as plan:
                self._optimizer.prepare_step(plan)
                self.add_plan(plan)
        self.add_rest()

    def add_plan(self, plan: StepPlan) -> None:
        """Add the parameters of a plan, and compute their exact updates. `prepare_step` was called for it."""
        assert isinstance(self._optimizer, LowPrecisionOptimizer)
        for backend_step in plan.backend_steps:
            fused_group = backend_step.fused_group
            rows = [self._watched.row[entry.param] for entry in fused_group.entries]
            self.stepped.update(rows)
            block = self._earlier_blocks.get(fused_group)
            if block is None:
                self._watched.record_first_low_bits(rows)
                block = ParameterBlock(self._watched, rows, fused_group.weights)
                if fused_group.spec.param_dtype in LOW_PRECISION_DTYPES:
                    block.updates = FusedGroupUpdates(self._optimizer, backend_step, block.samples)
            if block.updates is not None:
                block.updates.compute(self.with_decay)
            block.look_for_gradients([entry.tensors["grad"] for entry in fused_group.entries])
            self.blocks.append(block)
            self.fused_blocks[fused_group] = block
            if fused_group.enabled is not None:
                self.enabled = fused_group.enabled

    def add_rest(self) -> None:
        """Add the parameters that are in no plan: those without gradient, and all those of another library."""
        params, is_ours = self._watched.params, isinstance(self._optimizer, LowPrecisionOptimizer)
        rest = [row for row in range(len(params)) if row not in self.stepped]
        self._watched.record_first_low_bits(rest)
        grads = {row: None if is_ours else params[row].grad for row in rest}
        low_bits = {row: self._watched.low_bits(row) for row in rest}
        for rows in self._watched.divide(rest, low_bits, grads):
            block = ParameterBlock(self._watched, rows, [local_shard(params[row]) for row in rows])
            present = [local_shard(grad) for row in rows if (grad := grads[row]) is not None]
            if present:  # then in all of these rows
                block.look_for_gradients(present)
                if params[rows[0]].dtype in LOW_PRECISION_DTYPES:
                    block.record_values(present)
            self.blocks.append(block)

    def sum_up(self, across_ranks: bool) -> None:
        """Compare, after the step, what it has changed with the exact updates."""
        for block in self.blocks:
            sums = block.finish_step()
            if across_ranks:
                sum_over_shards(sums, block.sharding)
            self.sums.append((block.rows, sums))
