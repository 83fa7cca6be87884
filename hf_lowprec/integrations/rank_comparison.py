"""Compares the ranks once, before an optimizer's first step: different settings or weights make replicas diverge.

`prepare_accelerator` adds it to the accelerator's optimizers, whatever their class, and a difference is an error. The
warnings before a first step are in `misuse.py`: every optimizer of ours gives them, with or without an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from hf_lowprec.integrations import seams
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.reduction.object_gather import gather_if_different
from hf_lowprec.reduction.replicas import find_replica_difference, synchronized_parameters, with_optimizer_states
from hf_lowprec.reduction.same_settings import check_same_settings, optimizer_settings, to_plain_value


class RankComparison:
    """Compares the ranks before the first step of each optimizer that it watches, by a step pre-hook.

    Args:
        accelerator: its models name the parameters.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._hooks: dict[torch.optim.Optimizer, Any] = {}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare before the coming step of `optimizer`, where there are ranks to compare."""
        if self.accelerator.num_processes > 1 and optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.compare(optimizer, getattr(optimizer, "limit", None))

    def compare(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        """Compare class and settings of the optimizer, its parameters and their values, unless that is done.

        Args:
            optimizer: one that may be watched.
            max_grad_norm: what its coming step will clip by.

        Raises:
            RuntimeError: on every rank, with the rank and what differs.
        """
        hook = self._hooks.pop(optimizer, None)
        if hook is None:
            return
        hook.remove()
        names = {
            param: name
            for model in seams.prepared_models(self.accelerator)
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
        ours = isinstance(optimizer, LowPrecisionOptimizer)  # states of others may be parts, each rank's own
        named = ((names[param], param) for param in trained)
        found = find_replica_difference(with_optimizer_states(named, optimizer if ours else None))
        every = gather_if_different(found) or [found]  # replicas of shards are compared in several groups
        if any(every):
            raise RuntimeError(
                f"before the first step, {next(filter(None, every))}: start all ranks from the same weights"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"accelerator": self.accelerator, "_hooks": {}}  # torch pickles optimizers without hooks
