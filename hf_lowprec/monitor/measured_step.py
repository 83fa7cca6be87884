"""The measurement of one step, in blocks of parameters, for our optimizers and for any other."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lowprec.monitor.exact_update import FusedGroupUpdates
from hf_lowprec.monitor.missing_gradients import GradientRecord
from hf_lowprec.monitor.parameter_block import ParameterBlock
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.monitor.replayed_update import (
    ReplayedUpdates,
    ReplayRefused,
    is_refuted,
    refusal,
    state_signature,
)
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.step.step_plan import StepPlan

logger = logging.getLogger(__name__)


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

    Attributes:
        refusal: why exact updates cannot be computed for this optimizer, if they cannot.

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
        self.refusal = None if isinstance(optimizer, LowPrecisionOptimizer) else refusal(optimizer)
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
        """Add all parameters before they are stepped, and compute their exact updates."""
        if not isinstance(self._optimizer, LowPrecisionOptimizer):
            self._add_replayed(step)
            return
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
        """Add the parameters that are in none of the plans that were added."""
        self._blocks = step.blocks_of_groups
        self._watched.record_first_low_bits(set(self._watched.row.values()) - step.stepped)
        self._add_unstepped(step.stepped, step)

    def _add_replayed(self, step: MeasuredStep) -> None:
        """Add the parameters of any other optimizer."""
        group_of = [group for group in self._optimizer.param_groups for _ in group["params"]]
        with_grad = [row for row, param in enumerate(self._watched.params) if param.grad is not None]
        measured = [row for row in with_grad if self._watched.params[row].dtype in self._dtypes]
        signatures: dict[int, Any] = dict.fromkeys(with_grad)
        if self.refusal is None:
            try:
                for row in measured:
                    param = self._watched.params[row]
                    signatures[row] = param.grad.dtype, state_signature(self._optimizer.state.get(param, {}), param)  # type: ignore[union-attr]
            except ReplayRefused as error:
                self._refuse(str(error))
        blocks: dict[Any, ParameterBlock] = {}
        for rows in self._watched.alike(with_grad, list(map(id, group_of)), signatures):
            params = [self._watched.params[row] for row in rows]
            group, is_measured = group_of[rows[0]], params[0].dtype in self._dtypes
            is_replayed = self.refusal is None and is_measured
            key = tuple(rows), id(group), is_replayed
            block = self._blocks.get(key)
            if block is None:
                weights = list(map(local_shard, params))
                samples = ParameterSamples(weights, self._watched.sample_size)
                updates = ReplayedUpdates(self._optimizer, params, group, samples) if is_replayed else None
                block = ParameterBlock(self._watched, rows, weights, samples, sharding_of(params[0]), updates)
            blocks[key] = block
            if block.updates is not None:
                try:
                    block.exact = block.updates.compute(step.with_decay)
                except ReplayRefused as error:
                    self._refuse(str(error))
            if is_measured and block.exact is None:
                block.weight = block.samples.gather(block.weights, "weight")
            block.look_for_gradients([local_shard(param.grad) for param in params], self._gradients.nonzero)  # type: ignore[arg-type]
        step.blocks += blocks.values()
        self._blocks = blocks
        self._add_unstepped(set(with_grad), step)

    def _add_unstepped(self, stepped: set[int], step: MeasuredStep) -> None:
        """Add blocks of the parameters that have no gradient in this step."""
        rest = [row for row in range(len(self._watched.params)) if row not in stepped]
        low_bits = {row: self._watched.low_bits(row) for row in rest}
        dtypes = {row: None if shard is None else shard.dtype for row, shard in low_bits.items()}
        for rows in self._watched.alike(rest, dtypes):
            key = ("unstepped", *rows)
            if key not in self._blocks:
                params = [self._watched.params[row] for row in rows]
                weights = list(map(local_shard, params))
                samples = ParameterSamples(weights, self._watched.sample_size)
                self._blocks[key] = ParameterBlock(self._watched, rows, weights, samples, sharding_of(params[0]), None)
            step.blocks.append(self._blocks[key])

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        logger.debug("hf_lowprec: the updates of %s are not measured: %s", type(self._optimizer).__name__, reason)

    def check_replay(self, step: MeasuredStep) -> None:
        """Refuse to replay an optimizer whose updates turn out not to be elementwise."""
        counts = torch.zeros(2, dtype=torch.float64)
        replayed = [block for block in step.blocks if isinstance(block.updates, ReplayedUpdates) and block.exact]
        for block in replayed:
            part = block.agreement()
            if self._across_ranks:
                sum_over_shards(part, block.sharding)
            counts += part.cpu()
        if is_refuted(counts):
            self._refuse("its updates of a sample are not those of the weights")
            for block in replayed:
                block.forget_update()

    def sum_up(self, step: MeasuredStep) -> None:
        """Compare what the step has changed with the exact updates."""
        for block in step.blocks:
            sums = block.sums()
            if self._across_ranks:
                sum_over_shards(sums, block.sharding)
            step.results.append((block.rows, sums))
            block.exact = block.weight = block.grad_seen = None
