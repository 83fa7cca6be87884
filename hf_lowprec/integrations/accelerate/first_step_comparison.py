"""Compares the ranks before an optimizer's first step: with different settings or weights, replicas would diverge.

`prepare_accelerator` adds the comparison to all optimizers of the accelerator, and a difference is an error. The
warnings that our optimizers give with or without an accelerator are in `setup_warnings.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from hf_lowprec.integrations.accelerate import private_apis
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.reduction.collectives import gather_if_different
from hf_lowprec.reduction.compare_replicas import (
    find_replica_difference,
    synchronized_parameters,
    with_optimizer_states,
)
from hf_lowprec.reduction.same_settings import check_same_settings, optimizer_settings, to_plain_value


class FirstStepComparison:
    """Compares the ranks before the first step of each optimizer that it watches, by a step pre-hook.

    Args:
        accelerator: provides the number of ranks and, through its models, the names of parameters.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._hooks: dict[torch.optim.Optimizer, Any] = {}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare before the next step of `optimizer`, if there are several ranks."""
        if self.accelerator.num_processes > 1 and optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._hooks:
            del self._hooks[optimizer]  # the hook stays, since torch is going through the hooks; it does nothing more
            self._compare(optimizer, getattr(optimizer, "limit", None))

    def compare(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        """Compare the optimizer's class, settings, parameters and their values, if it is watched; stop watching it.

        Args:
            optimizer: any optimizer.
            max_grad_norm: the norm to which its next step clips, or None.

        Raises:
            RuntimeError: on every rank; the message names the ranks and the difference.
        """
        hook = self._hooks.pop(optimizer, None)
        if hook is not None:
            hook.remove()
            self._compare(optimizer, max_grad_norm)

    def _compare(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        names = {
            param: name
            for model in private_apis.prepared_models(self.accelerator)
            for name, param in synchronized_parameters(model)
        }
        check_same_settings(
            {
                "max_grad_norm": to_plain_value(max_grad_norm),
                "gradient_accumulation_steps": self.accelerator.gradient_accumulation_steps,
                **optimizer_settings(optimizer, names),
            }
        )
        trained = (param for group in optimizer.param_groups for param in group["params"] if param in names)
        named = ((names[param], param) for param in trained)
        # Other optimizers may keep a different part of their state on each rank.
        with_its_state = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
        difference = find_replica_difference(with_optimizer_states(named, with_its_state))
        of_ranks = gather_if_different(difference) or [difference]  # replicas of shards are in several groups
        if any(of_ranks):
            raise RuntimeError(
                f"before the first step, {next(filter(None, of_ranks))}: start all ranks from the same weights"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"accelerator": self.accelerator, "_hooks": {}}  # torch pickles optimizers without hooks
