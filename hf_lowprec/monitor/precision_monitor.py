"""Watches an optimizer: measures, at chosen steps, what of a step the stored weights and states take in.

Before the step, the exact change of a sample of the weights is computed; after it, the change of what is stored. Hooks
of the optimizer call both, so what is measured is what really happened, whatever the optimizer is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.diagnostics.finding import Finding
from hf_lowprec.diagnostics.uncast_matrices import uncast_matrices
from hf_lowprec.monitor.exact_update import FusedGroupUpdates
from hf_lowprec.monitor.findings import ENOUGH_MEASUREMENTS, Evidence, find
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
from hf_lowprec.monitor.step_precision import StepPrecision
from hf_lowprec.monitor.step_statistics import COLUMN, SLOPE_SUMS, SUMS
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release import GradientRelease, gradient_release_of
from hf_lowprec.optim.sharding import local_shard, sharding_of, sum_over_shards
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

DECAY_EVERY = 8
"""Steps between measurements of the weight decay, which cost as much as all others."""
REMEMBERED = 0.97
"""The factor by which earlier measurements of the weight decay lose weight; some thirty of them count."""

_DECAY = slice(COLUMN["weight_decay_square"], COLUMN["weight_decay_square"] + len(SLOPE_SUMS))

logger = logging.getLogger(__name__)


class PrecisionMonitor:
    """Measures how much of an optimizer's steps 16-bit weights and states take in, on a sample of each tensor.

    ```python
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=100)
    ...  # train
    print(monitor.last.by_kind["all"]["lost_updates"], *monitor.findings(), sep="\\n")
    ```

    Any `torch.optim.Optimizer` can be watched. For those of this package, the exact update is computed by their
    formula; for others, by repeating their step on the sample in FP64. Updates that cannot be computed element by
    element (Adafactor, Muon, 8-bit states of other libraries) are not: then only the share of weights that changed is
    known. A step with a closure, and one that `skip_nonfinite` skips, is not measured.

    With `gradient_release`, parameters are measured when they are stepped, during the backward pass. Call
    `measure_next_step` before it.

    With sharded parameters (FSDP2), all ranks must measure the same steps, and get the same numbers.

    Args:
        optimizer: the optimizer, or Accelerate's wrapper of it.
        model: the model, for the names and kinds of its parameters. Build the monitor where training begins: "moved"
            means moved since then.
        every: measure the first step and then every `every`-th; 0 measures only when `measure_next_step` was called.
        dtypes: the dtypes of the weights whose updates are measured.
        across_ranks: add up the numbers of sharded parameters over ranks; else they are those of this rank's shards.
        on_error: is called with an error in the hooks, after which nothing more is measured. Without it, the error ends
            the step.

    Raises:
        ValueError: `every` is negative.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module | None = None,
        *,
        every: int = 0,
        dtypes: Collection[torch.dtype] = LOW_PRECISION_DTYPES,
        across_ranks: bool = True,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        if every < 0:
            raise ValueError(f"every={every} is negative; use 0 to measure only when measure_next_step() was called")
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.model = model
        self.every = every
        self.dtypes = dtypes
        self.across_ranks = across_ranks
        self.on_error = on_error
        self._failed = False
        self.steps = 0
        """Steps that the optimizer has taken since the monitor was built."""
        self.refusal: str | None = None
        """Why exact updates cannot be computed for this optimizer, if they cannot."""
        if not isinstance(self.optimizer, LowPrecisionOptimizer):
            self.refusal = refusal(self.optimizer)
        self._number: int | None = None
        self._due = False
        self._depth = 0
        self._last: StepPrecision | None = None
        self._running: _Measurement | None = None
        self._finished: _Measurement | None = None
        self._decay_measured_at: int | None = None
        self._begun = False
        self._watch_parameters()
        if self._release is not None:
            self._release.before_bucket.append(self._run_before_bucket)
        self._hooks = [
            self.optimizer.register_step_pre_hook(partial(self._run_hook, "_before_step")),
            self.optimizer.register_step_post_hook(partial(self._run_hook, "_after_step")),
        ]

    def measure_next_step(self, number: int | None = None) -> None:
        """Measure the coming step. `number` is the number that it gets; by default, steps are counted from 1."""
        self._due, self._number, self._depth, self._begun = True, number, 0, False

    @property
    def last(self) -> StepPrecision | None:
        """The last measurement; None before the first one, or if the step was skipped. Waits for the device."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self._last = self._evaluate(finished)
        return self._last

    def findings(self) -> list[Finding]:
        """Warnings from the last measurement and the run up to it; empty for a healthy run."""
        precision = self.last
        if precision is None:
            return []
        return find(
            Evidence(
                optimizer=self.optimizer,
                precision=precision,
                dtypes=[param.dtype for param in self._watched.params],
                gradients=self._gradients,
                uncast_matrices=self._uncast_matrices,
            )
        )

    @property
    def unused(self) -> list[str]:
        """The names of parameters that the task does not seem to use: none of at least 3 measured steps gave them a
        gradient. Where something tells that this is a mistake, they are among the findings instead."""
        return self._gradients.unused() if self._gradients.steps >= ENOUGH_MEASUREMENTS else []

    @cached_property
    def _uncast_matrices(self) -> list[str]:
        return [] if self.model is None else uncast_matrices(self.model)

    def close(self) -> None:
        """Stop watching: remove the hooks and release everything."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._release is not None and self._run_before_bucket in self._release.before_bucket:
            self._release.before_bucket.remove(self._run_before_bucket)
        self._running = self._finished = None
        self._blocks.clear()

    @property
    def _release(self) -> GradientRelease | None:
        return gradient_release_of(self.optimizer)

    def _watch_parameters(self) -> None:
        """Watch the parameters that the optimizer has now."""
        self._watched = WatchedParameters(self.optimizer, self.model)
        params, names = self._watched.params, self._watched.names
        self._gradients = GradientRecord(names, params, self.model)
        self._decay = torch.zeros(len(params), len(SLOPE_SUMS), dtype=torch.float64)
        self._blocks: dict[Any, ParameterBlock] = {}

    # The hooks.

    def _run_hook(self, name: str, *arguments: Any) -> None:
        if self._failed:
            return
        try:
            getattr(self, name)(*arguments)
        except Exception as error:
            self._failed, self._running, self._finished = True, None, None
            if self.on_error is None:
                raise
            self.on_error(error)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:  # a subclass that calls its parent's `step`, which has the hooks as well
            return
        if self._release is None or not self._begun:  # else the first bucket has, during the backward pass
            # A closure computes the gradients only now.
            self._begin(kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None))
        running = self._running
        if running is None or self._release is not None:
            return
        if isinstance(optimizer, LowPrecisionOptimizer):
            self._prepare_own(optimizer, running)
        else:
            self._prepare_replay(running)

    def _run_before_bucket(self, plan: StepPlan) -> None:
        self._run_hook("_before_bucket", plan)

    @torch.no_grad()
    def _before_bucket(self, plan: StepPlan) -> None:
        """Gradient release is about to step the parameters of `plan`."""
        if not self._begun:
            self._begin(has_closure=False)
        if self._running is not None:
            assert isinstance(self.optimizer, LowPrecisionOptimizer)
            self._prepare_plan(self.optimizer, plan, self._running)

    def _begin(self, has_closure: bool) -> None:
        """Begin a step: if it is to be measured, set `_running`."""
        self._begun = True
        self._running = None
        due = self._due or (self.every > 0 and (self.steps == 0 or (self.steps + 1) % self.every == 0))
        self._due = False
        if not due:
            return
        if self._finished is not None:  # what adds up over measurements needs each of them
            self._evaluate(self._finished)
        self._finished, self._last = None, None
        if has_closure or _is_capturing():
            return
        groups = self.optimizer.param_groups
        if len(self._watched.params) != sum(len(group["params"]) for group in groups):
            self._watch_parameters()
        number = self.steps + 1 if self._number is None else self._number
        with_decay = self._decay_measured_at is None or self.steps >= self._decay_measured_at + DECAY_EVERY
        self._number = None
        rates = [rate for group in groups if (rate := group.get("lr")) is not None]
        self._running = _Measurement(number, with_decay, rates, self._gradients.look())
        if with_decay:
            self._decay_measured_at = self.steps

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        self.steps += 1
        self._begun = False
        running, self._running = self._running, None
        if running is not None:
            if not self._gradients.steps:  # once is enough
                self._check_replay(running)
            if self._release is not None:
                self._blocks = running.blocks_of_groups
                self._add_unstepped(running.stepped, running)
                # Of the gradients that are there now, only those that the optimizer does not step were never released.
                count = len(self._watched.params)
                running.gradients = [row in running.stepped for row in range(count)] + self._gradients.look()[count:]
            for block in running.blocks:
                sums = block.sums(self._watched.first_weights, self._watched.first_compensations)
                if self.across_ranks:
                    sum_over_shards(sums, block.sharding)
                running.results.append((block.rows, sums))
                block.exact = block.weight = block.grad_seen = None
            self._finished = running
        if self.steps == 1 and not _is_capturing():
            self._watched.record_first_compensations()

    def _check_replay(self, running: _Measurement) -> None:
        """Refuse to replay an optimizer whose updates turn out not to be elementwise."""
        counts = torch.zeros(2, dtype=torch.float64)
        replayed = [block for block in running.blocks if isinstance(block.updates, ReplayedUpdates) and block.exact]
        for block in replayed:
            part = block.agreement()
            if self.across_ranks:
                sum_over_shards(part, block.sharding)
            counts += part.cpu()
        if is_refuted(counts):
            self._refuse("its updates of a sample are not those of the weights")
            for block in replayed:
                block.forget_update()

    def _prepare_own(self, optimizer: LowPrecisionOptimizer, running: _Measurement) -> None:
        """Compute the exact updates of an optimizer of this package."""
        with optimizer.plan_step() as plan:
            optimizer.prepare_step(plan)
            self._prepare_plan(optimizer, plan, running)
        self._blocks = running.blocks_of_groups
        self._add_unstepped(running.stepped, running)

    def _prepare_plan(self, optimizer: LowPrecisionOptimizer, plan: StepPlan, running: _Measurement) -> None:
        """Compute the exact updates of the parameters of a plan, for which `prepare_step` was called."""
        for backend_step in plan.backend_steps:
            fused_group = backend_step.fused_group
            rows = [self._watched.row[entry.param] for entry in fused_group.entries]
            running.stepped.update(rows)
            block = self._blocks.get(fused_group)
            if block is None:
                samples = ParameterSamples(fused_group.weights, self._watched.sample_size)
                measured = fused_group.spec.param_dtype in self.dtypes
                updates = FusedGroupUpdates(optimizer, backend_step, samples) if measured else None
                block = ParameterBlock(rows, fused_group.weights, samples, fused_group.sharding, updates)
            if block.updates is not None:
                block.exact = block.updates.compute(running.with_decay)
            block.look_for_gradients([entry.grad for entry in fused_group.entries], self._gradients.nonzero)
            running.blocks.append(block)
            running.blocks_of_groups[fused_group] = block
            if fused_group.enabled is not None:
                running.enabled = fused_group.enabled

    def _prepare_replay(self, running: _Measurement) -> None:
        """Compute the exact updates of any other optimizer."""
        group_of = [group for group in self.optimizer.param_groups for _ in group["params"]]
        with_grad = [row for row, param in enumerate(self._watched.params) if param.grad is not None]
        measured = [row for row in with_grad if self._watched.params[row].dtype in self.dtypes]
        signatures: dict[int, Any] = dict.fromkeys(with_grad)
        if self.refusal is None:
            try:
                for row in measured:
                    param = self._watched.params[row]
                    signatures[row] = param.grad.dtype, state_signature(self.optimizer.state.get(param, {}), param)  # type: ignore[union-attr]
            except ReplayRefused as error:
                self._refuse(str(error))
        blocks: dict[Any, ParameterBlock] = {}
        for rows in self._watched.alike(with_grad, list(map(id, group_of)), signatures):
            params = [self._watched.params[row] for row in rows]
            is_measured = params[0].dtype in self.dtypes
            key = (tuple(rows), self.refusal is None and is_measured)
            block = self._blocks.get(key)
            if block is None:
                weights = list(map(local_shard, params))
                samples = ParameterSamples(weights, self._watched.sample_size)
                updates = ReplayedUpdates(self.optimizer, params, group_of[rows[0]], samples) if key[1] else None
                block = ParameterBlock(rows, weights, samples, sharding_of(params[0]), updates)
            blocks[key] = block
            if block.updates is not None:
                try:
                    block.exact = block.updates.compute(running.with_decay)
                except ReplayRefused as error:
                    self._refuse(str(error))
            if is_measured and block.exact is None:
                block.weight = block.samples.gather(block.weights, "weight")
            block.look_for_gradients([local_shard(param.grad) for param in params], self._gradients.nonzero)  # type: ignore[arg-type]
        running.blocks += blocks.values()
        self._blocks = blocks
        self._add_unstepped(set(with_grad), running)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        logger.debug("hf_lowprec: the updates of %s are not measured: %s", type(self.optimizer).__name__, reason)

    def _add_unstepped(self, stepped: set[int], running: _Measurement) -> None:
        """Add blocks of the parameters that have no gradient in this step."""
        for rows in self._watched.alike(row for row in range(len(self._watched.params)) if row not in stepped):
            key = ("unstepped", *rows)
            if key not in self._blocks:
                weights = [local_shard(self._watched.params[row]) for row in rows]
                samples = ParameterSamples(weights, self._watched.sample_size)
                self._blocks[key] = ParameterBlock(
                    rows, weights, samples, sharding_of(self._watched.params[rows[0]]), None
                )
            running.blocks.append(self._blocks[key])

    # The result.

    def _evaluate(self, finished: _Measurement) -> StepPrecision | None:
        """Turn sums into numbers; None if the step was skipped."""
        if finished.enabled is not None and not bool(finished.enabled):
            return None
        table = torch.zeros(len(self._watched.params), len(SUMS), dtype=torch.float64)
        for rows, sums in finished.results:
            table[rows] = sums.cpu()
        if finished.with_decay:
            forget = torch.tensor([REMEMBERED, REMEMBERED, REMEMBERED**2, REMEMBERED**2], dtype=torch.float64)
            self._decay = self._decay * forget + table[:, _DECAY].nan_to_num()
        table[:, _DECAY] = self._decay
        table[:, COLUMN["has_gradient"]] = table[:, COLUMN["has_gradient"]].clamp(
            max=1
        )  # the number of shards with one
        nonzero = (table[:, COLUMN["has_gradient"]] > 0).tolist()
        self._gradients.add(finished.gradients, nonzero)
        rate = max(map(float, finished.learning_rates), default=None)
        return StepPrecision(finished.number, table, self._watched.names, self._watched.kinds, rate)


class _Measurement:
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


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
