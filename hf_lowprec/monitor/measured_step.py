"""The measurement of one step, in blocks of parameters, for our optimizers and for any other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import FusedGroupUpdates
from hf_lowprec.monitor.missing_gradients import GradientRecord
from hf_lowprec.monitor.parameter_block import ParameterBlock
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.step.step_plan import StepPlan


class MeasuredStep:
    """One measured step.

    Attributes:
        number: of the step.
        with_decay: whether the weight decay is measured.
        learning_rates: those of the parameter groups.
        gradients: which parameters have one, see `GradientRecord.look`.
        blocks: what is measured together.
        blocks_of_groups: the blocks of one of our optimizers, by fused group.
        stepped: rows of the parameters that one of our optimizers steps.
        results: the rows of each block with their sums, after the step.
        enabled: whether the step is taken, a bool scalar on its device; None is yes.
    """

    def __init__(
        self, number: int, with_decay: bool, learning_rates: Sequence[float | Tensor], gradients: list[bool]
    ) -> None:
        self.number = number
        self.learning_rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in learning_rates]
        self.with_decay = with_decay
        self.gradients = gradients
        self.blocks: list[ParameterBlock] = []
        self.blocks_of_groups: dict[Any, ParameterBlock] = {}
        self.stepped: set[int] = set()
        self.results: list[tuple[list[int], Tensor]] = []
        self.enabled: Tensor | None = None


class MeasuredBlocks:
    """Divides the parameters of each measured step into blocks, which are kept for the next one while they fit.

    Args:
        optimizer: the optimizer.
        watched: its parameters.
        gradients: which of them have had gradients.
        dtypes: the dtypes of the weights whose updates are measured.
        across_ranks: add up the numbers of sharded parameters over ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watched: WatchedParameters,
        gradients: GradientRecord,
        dtypes: Collection[torch.dtype],
        across_ranks: bool,
    ) -> None:
        self._optimizer = optimizer
        self._watched = watched
        self._gradients = gradients
        self._dtypes = dtypes
        self._across_ranks = across_ranks
        self._blocks: dict[Any, ParameterBlock] = {}

    def clear(self) -> None:
        """Forget the blocks, which hold on to the tensors of a plan."""
        self._blocks.clear()

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
        """Add the parameters of a plan of one of our optimizers, which has called `prepare_step`."""
        assert isinstance(self._optimizer, LowPrecisionOptimizer)
        for backend_step in plan.backend_steps:
            fused_group = backend_step.fused_group
            rows = [self._watched.row[entry.param] for entry in fused_group.entries]
            step.stepped.update(rows)
            block = self._blocks.get(fused_group)
            if block is None:
                self._watched.record_first_low_bits(rows)
                samples = ParameterSamples(fused_group.weights, self._watched.sample_size)
                measured = fused_group.spec.param_dtype in self._dtypes
                updates = FusedGroupUpdates(self._optimizer, backend_step, samples) if measured else None
                block = ParameterBlock(self._watched, rows, fused_group.weights, samples, fused_group.sharding, updates)
            if block.updates is not None:
                block.exact = block.updates.compute(step.with_decay)
            block.look_for_gradients([entry.grad for entry in fused_group.entries], self._gradients.nonzero)
            step.blocks.append(block)
            step.blocks_of_groups[fused_group] = block
            if fused_group.enabled is not None:
                step.enabled = fused_group.enabled

    def add_rest(self, step: MeasuredStep) -> None:
        """Add the parameters that are in no plan: those without gradient, and all those of another library."""
        self._blocks = step.blocks_of_groups
        params, is_ours = self._watched.params, isinstance(self._optimizer, LowPrecisionOptimizer)
        rest = [row for row in range(len(params)) if row not in step.stepped]
        self._watched.record_first_low_bits(rest)
        low_bits = {row: self._watched.low_bits(row) for row in rest}
        grads = {row: local_shard(grad) for row in rest if (grad := params[row].grad) is not None and not is_ours}
        low_bits_dtypes, grad_dtypes = (
            {row: None if (tensor := tensors.get(row)) is None else tensor.dtype for row in rest}
            for tensors in (low_bits, grads)
        )
        for rows in self._watched.alike(rest, low_bits_dtypes, grad_dtypes):
            weights = [local_shard(params[row]) for row in rows]
            samples = ParameterSamples(weights, self._watched.sample_size)
            block = ParameterBlock(self._watched, rows, weights, samples, sharding_of(params[rows[0]]), None)
            if rows[0] in grads:
                of_rows = [grads[row] for row in rows]
                block.look_for_gradients(of_rows, self._gradients.nonzero)
                if params[rows[0]].dtype in self._dtypes:
                    block.record_values(of_rows)
            step.blocks.append(block)

    def sum_up(self, step: MeasuredStep) -> None:
        """Compare what the step has changed with the exact updates."""
        for block in step.blocks:
            sums = block.sums()
            if self._across_ranks:
                sum_over_shards(sums, block.sharding)
            step.results.append((block.rows, sums))
            block.end_step()
