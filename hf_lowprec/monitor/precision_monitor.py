"""Watches an optimizer: measures, at chosen steps, how much of a step reaches the stored weights and states.

If the optimizer is ours, the exact change of a sample of the weights is computed before the step; the change of what is
stored is computed after it. Both are called by hooks of the optimizer, so real steps are measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_lowprec.monitor.measured_step import MeasuredStep, ParameterBlock
from hf_lowprec.monitor.rules import Finding, MeasuredRun, uncast_matrices
from hf_lowprec.monitor.step_precision import COLUMN, SHARE_SUMS, SUMS, StepPrecision
from hf_lowprec.monitor.watched_parameters import WatchedParameters
from hf_lowprec.once import cached_property
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.param_groups import unwrap_optimizer
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.step.step_plan import StepPlan

DECAY_EVERY = 8
"""Steps between measurements of the weight decay, each of which costs as much as all others."""
REMEMBERED = 0.97
"""The factor by which each measurement of the weight decay discounts earlier ones; some thirty of them count."""

_DECAY = slice(COLUMN["weight_decay_square"], COLUMN["weight_decay_square"] + len(SHARE_SUMS))


class PrecisionMonitor:
    """Measures how much of an optimizer's steps is lost in rounding, on a sample of each tensor.

    ```python
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=100)
    ...  # train
    print(monitor.last.by_kind["all"]["lost_updates"], *monitor.findings(), sep="\\n")
    ```

    Any `torch.optim.Optimizer` can be watched. For optimizers of this package, the exact update is computed by their
    formula. For others, only the share of weights that changed is known, which is enough to tell whether updates are
    lost. Steps with a closure, and steps that `skip_nonfinite` skips, are not measured.

    With `gradient_release`, parameters are measured when they are updated, during the backward pass. Call
    `measure_next_step` before that.

    With sharded parameters (FSDP2), all ranks must measure the same steps, and get the same numbers.

    Args:
        optimizer: the optimizer, or Accelerate's wrapper around it.
        model: the model, for the names and kinds of its parameters. Build the monitor when training begins: it counts
            weights as moved if they have changed since then.
        every: measure the first step and then every `every`-th. With 0, the default, only steps that follow a
            call to `measure_next_step` are measured.
        across_ranks: sum the numbers of sharded parameters over ranks; otherwise, they cover only this rank's shards.
        on_error: called with an error in a measurement, after which nothing more is measured. Without it, the step
            raises the error.

    Raises:
        ValueError: `every` is negative.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module | None = None,
        *,
        every: int = 0,
        across_ranks: bool = True,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        if every < 0:
            raise ValueError(f"every={every} is negative; use 0 to measure only when measure_next_step() was called")
        self.optimizer: torch.optim.Optimizer = unwrap_optimizer(optimizer)
        self.model = model
        self.every = every
        self.across_ranks = across_ranks
        self.on_error = on_error
        self.steps = 0
        """Steps that the optimizer has taken since the monitor was built."""
        self._measured_at = 0
        self._next_number: int | None = None  # of the coming step, if `measure_next_step` was called for it
        self._was_asked = False
        self._failed = False
        self._depth = 0  # of calls of `step`, which may call that of a parent class
        self._begun = False  # the running step
        self._running: MeasuredStep | None = None
        self._finished: MeasuredStep | None = None
        self._last: StepPrecision | None = None
        self._watch_parameters()
        before, after = (partial(self._run_hook, name) for name in ("_before_step", "_after_step"))
        hooks = self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)
        self._remove_hooks: list[Callable[[], None]] = [hook.remove for hook in hooks]
        if isinstance(self.optimizer, LowPrecisionOptimizer):
            before_part, calls = partial(self._run_hook, "_before_part"), self.optimizer.before_part
            calls.append(before_part)
            self._remove_hooks.append(partial(calls.remove, before_part))

    def measure_next_step(self, number: int | None = None) -> None:
        """Measure the next step. `number` is the step's number; by default, steps are counted from 1."""
        self._next_number = self.steps + 1 if number is None else number
        self._depth, self._begun, self._was_asked = 0, False, True

    @property
    def last(self) -> StepPrecision | None:
        """The last measurement, or None before the first one or if the step was skipped. Waits for the device."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self._last = self._evaluate(finished)
        return self._last

    def findings(self) -> list[Finding]:
        """Return warnings about the last measurement and the run up to it; the list is empty for a healthy run.

        Raises:
            RuntimeError: steps were taken, and the monitor was never asked to measure any.
        """
        if self.steps and not self.every and not self._was_asked:
            raise RuntimeError(
                f"PrecisionMonitor(every=0) was not asked to measure any of the {self.steps} steps so far; set "
                "every=100 to measure every hundredth step, or call measure_next_step() before a step"
            )
        if (precision := self.last) is None:
            return []
        run = MeasuredRun(self.optimizer, precision, self._measured_at, self._watched.gradients, self._uncast_matrices)
        return [*run.findings()]

    @cached_property
    def _uncast_matrices(self) -> list[str]:
        return [] if self.model is None else uncast_matrices(self.model)

    def close(self) -> None:
        """Stop watching: remove the hooks and release everything."""
        while self._remove_hooks:
            self._remove_hooks.pop()()
        self._running = self._finished = None
        self._fused_blocks.clear()

    @property
    def _steps_in_parts(self) -> bool:
        """True if parameters are measured part by part, before `step` is called."""
        return isinstance(self.optimizer, LowPrecisionOptimizer) and self.optimizer.gradients.stepped_in_parts

    def _watch_parameters(self) -> None:
        """Watch the parameters that the optimizer has now."""
        self._watched = WatchedParameters(self.optimizer, self.model)
        self._decay = torch.zeros(len(self._watched.params), len(SHARE_SUMS), dtype=torch.float64, device="cpu")
        self._decay_measured_at = -DECAY_EVERY
        self._fused_blocks: dict[Any, ParameterBlock] = {}

    # The hooks.

    def _run_hook(self, name: str, *arguments: Any) -> None:
        """Call the method `name`, unless an earlier call has raised an error."""
        if self._failed:
            return
        try:
            getattr(self, name)(*arguments)
        except Exception as error:
            self._failed, self._running, self._finished = True, None, None
            if self.on_error is None:
                raise
            self.on_error(error)

    @without_grad
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > _methods_of_a_step(type(optimizer)):  # an earlier step has raised and not run its last hooks
            self._depth = 1
        if self._depth > 1:
            return
        # With a closure, the gradients are computed only now.
        has_closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if not (self._begun and self._steps_in_parts):
            self._begin(has_closure)
        if self._steps_in_parts:
            return
        if self._running is not None:
            self._running.add_all()
            self._fused_blocks = self._running.fused_blocks
        elif self.steps == 0 and not has_closure and isinstance(self.optimizer, LowPrecisionOptimizer):
            with self.optimizer.plan_step():  # creates the states
                self._watched.record_first_low_bits()

    @without_grad
    def _before_part(self, plan: StepPlan) -> None:
        """Measure the parameters of `plan`, which the optimizer is about to step alone."""
        if not self._begun:
            self._begin(has_closure=False)
        if self.steps == 0:
            self._watched.record_first_low_bits()
        if self._running is not None:
            self._running.add_plan(plan)

    def _begin(self, has_closure: bool) -> None:
        """Begin a step; if it will be measured, set `_running`."""
        self._begun = True
        self._running = None
        number, self._next_number = self._next_number, None
        if number is None and self.every > 0 and (self.steps == 0 or (self.steps + 1) % self.every == 0):
            number = self.steps + 1
        if number is None:
            return
        if self._finished is not None:  # sums over measurements need each of them
            self._evaluate(self._finished)
        self._finished = self._last = None
        if has_closure:
            return
        if not self._watched.is_current():
            self._watch_parameters()
        with_decay = self.steps >= self._decay_measured_at + DECAY_EVERY
        if with_decay:
            self._decay_measured_at = self.steps
        self._running = MeasuredStep(self._watched, number, with_decay, self._fused_blocks)

    @without_grad
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        self.steps += 1
        running, self._running = self._running, None
        if running is not None:
            self._measured_at = self.steps
            if self._steps_in_parts:
                running.add_rest()
                self._fused_blocks = running.fused_blocks
                # The gradients of the optimizer's parameters were released; those of other parameters exist now.
                count = len(self._watched.params)
                others = self._watched.gradients.present_now(None)[count:]
                running.gradients = [row in running.stepped for row in range(count)] + others
            running.sum_up(self.across_ranks)
            self._finished = running
            if self._watched.is_cut:
                self._last, self._finished = self._evaluate(running), None  # all ranks do it now
        self._begun = False

    # The result.

    def _evaluate(self, finished: MeasuredStep) -> StepPrecision | None:
        """Turn sums into numbers; None if the step was skipped."""
        if finished.enabled is not None and not bool(finished.enabled):
            return None
        watched = self._watched
        table = torch.zeros(len(watched.params), len(SUMS), dtype=torch.float64, device="cpu")
        for rows, sums in finished.sums:
            table[rows] = sums.cpu()
        if finished.with_decay:
            factors = [REMEMBERED, REMEMBERED, REMEMBERED**2, REMEMBERED**2]
            forget = torch.tensor(factors, dtype=torch.float64, device="cpu")
            self._decay = self._decay * forget + table[:, _DECAY].nan_to_num()
        table[:, _DECAY] = self._decay
        table[:, COLUMN["has_gradient"]].clamp_(max=1)  # until here, the number of shards with one
        self._watched.gradients.add(finished.gradients, (table[:, COLUMN["has_gradient"]] > 0).tolist())
        rate = max(map(float, finished.learning_rates), default=None)
        columns: list[list[Any]] = [watched.names, watched.kinds, [param.dtype for param in watched.params]]
        if watched.is_cut and self.across_ranks:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (*columns, table))
            *columns, tables = (list(chain(*lists)) for lists in zip(*ranks, strict=True))
            table = torch.stack(tables)
        names, kinds, dtypes = columns
        return StepPrecision(finished.number, table, names, kinds, rate, dtypes)


def _methods_of_a_step(cls: type[torch.optim.Optimizer]) -> int:
    """Count the methods of a step, each of which runs the hooks: `step` may call a parent class's."""
    methods = {inspect.unwrap(vars(base)["step"]) for base in cls.__mro__ if "step" in vars(base)}
    return len(methods - {torch.optim.Optimizer.step})
