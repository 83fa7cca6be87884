"""The optimizer shell every algorithm shares: groups, lazy state, one call per layout and step.

An algorithm is a subclass that gives its states, its host-side scalars and its formula; rounding, state dtypes,
backends and checkpoints live here and below, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hf_lowprec.optim import backends, checkpoint, validation
from hf_lowprec.optim.plan import Plan
from hf_lowprec.optim.step import Update
from hf_lowprec.optim.work import Group
from hf_lowprec.rounding import MODES, State


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that train BF16 (or FP16) weights as accurately as FP32 ones.

    All arithmetic is FP32; parameters and states are stored in their own dtypes and rounded once, at the end of the
    update. FP32 parameters get the plain FP32 algorithm with FP32 states. Every argument but `backend` may also be
    set per parameter group.

    Args:
        params: parameters or groups, as for any `torch.optim.Optimizer`.
        defaults: the algorithm's own hyperparameters.
        rounding: `"kahan"` (a BF16 compensation carries what the weight could not hold), `"stochastic"` (unbiased, no
            extra state; BF16 parameters only) or `"nearest"`.
        state_dtype: `torch.bfloat16` or `torch.float32` for the states of low-precision parameters, or a mapping from
            state name to dtype; None means BF16.
        state_rounding: `"stochastic"` or `"nearest"` (the papers' textbook algorithms), for BF16 states and the
            compensation.
        seed: seed of the random bits. Replicas must share it.
        backend: `"auto"`, `"eager"` or `"native"` (CPU).

    Raises:
        ValueError: a hyperparameter, mode, dtype or parameter is not supported.
        RuntimeError: `backend` cannot run here.
    """

    update: ClassVar[Update]
    """The formula, a static method: `(weight, grad, state, scalars, **options) -> (change of the weight, new states)`.

    It takes and gives FP32 values and may use operators, `torch.where` and `sqrt_rn`; see `step.py`.
    """

    def __init__(
        self,
        params: Any,
        defaults: Group,
        *,
        rounding: str,
        state_dtype: torch.dtype | Mapping[str, torch.dtype] | None,
        state_rounding: str,
        seed: int,
        backend: str,
    ) -> None:
        backends.check(backend)
        self.backend = backend
        self._plan: Plan | None = None
        defaults = {
            **defaults,
            "rounding": rounding,
            "state_dtype": dict(state_dtype) if isinstance(state_dtype, Mapping) else state_dtype,
            "state_rounding": state_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    # What an algorithm defines.

    def states(self, group: Group) -> tuple[State, ...]:
        """The states a parameter of `group` has, in the order in which they are stored."""
        raise NotImplementedError

    def scalars(self, group: Group, lr: float, step: int) -> dict[str, float]:
        """The factors of step number `step` (from 1), computed in double precision; each is cast to FP32 once."""
        raise NotImplementedError

    def options(self, group: Group) -> dict[str, bool]:
        """Static choices of the formula; each combination is a kernel of its own."""
        return {}

    def check_hyperparameters(self, group: Group) -> None:
        """Raise ValueError if one of the algorithm's own hyperparameters is out of range."""
        raise NotImplementedError

    # What the shell does.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point; nothing is changed then.
            ValueError: a group was given an unsupported mode or dtype; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        with self.next_step() as plan:
            runs = [(backends.resolve(self.backend, batch), batch) for batch in plan.batches]
            for run, batch in runs:
                run(batch)
            for batch in plan.batches:
                batch.counts += 1
            plan.copy_back()
        return loss

    @contextmanager
    def next_step(self) -> Iterator[Plan]:
        """The coming step, ready to be run; creates missing states and changes nothing else.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point.
            ValueError: a group was given an unsupported mode, dtype or parameter.
        """
        for k, group in enumerate(self.param_groups):
            validation.check_group(self, group, f"param group {k}")
        plan = self._plan
        try:
            if plan is None or not plan.collect():
                plan = self._plan = Plan(self)
                plan.collect()
            for batch in plan.batches:
                batch.prepare(self.scalars)
            yield plan
        finally:
            if plan is not None:
                plan.release()

    def stored_states(self, group: Group, dtype: torch.dtype) -> tuple[State, ...]:
        """The algorithm's states and, if parameters of `dtype` are low-precision, those of the rounding mode."""
        own = self.states(group)
        return own if dtype == torch.float32 else own + MODES[group["rounding"]].auxiliary

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`; a group that is refused leaves no trace.

        Raises:
            ValueError: a hyperparameter, mode, dtype or parameter is not supported.
        """
        super().add_param_group(param_group)
        try:
            where = f"param group {len(self.param_groups) - 1}"
            validation.check_keys(self, self.param_groups[-1], where)
            validation.check_group(self, self.param_groups[-1], where)
            for param in self.param_groups[-1]["params"]:
                validation.check_param(param, self.param_groups[-1], where)
        except Exception:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same algorithm, rounding mode and parameter shapes; every state keeps its saved
        dtype.

        Raises:
            ValueError: the state dict does not fit; nothing is changed then.
        """
        final: list[dict[str, Any]] = []

        def check(optimizer: torch.optim.Optimizer, incoming: dict[str, Any]) -> None:
            checkpoint.check_state_dict(self, incoming)
            final.append(incoming)

        # Torch's loader casts states to the parameter's dtype; registered last, this sees what it will load.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        checkpoint.restore_dtypes(self, final[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None
        for group in self.param_groups:
            group.setdefault("maximize", False)
