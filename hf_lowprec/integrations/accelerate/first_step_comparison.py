"""Compares the ranks before an optimizer's first step: with different settings or weights, replicas would diverge.

`prepare_accelerator` adds the comparison to all optimizers of the accelerator, and a difference is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_lowprec.integrations.accelerate.private_apis import trains_on_several_ranks
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.reduction.collectives import gather_if_different
from hf_lowprec.reduction.compare_ranks import (
    check_same_settings,
    find_replica_difference,
    model_settings,
    optimizer_settings,
    synchronized_parameters,
    to_plain_value,
)


class FirstStepComparison:
    """Compares the ranks before the first step of each optimizer that it watches, by a step pre-hook.

    Args:
        accelerator: provides the number of ranks and the settings. It keeps this object, which has no reference to it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._num_processes = accelerator.num_processes
        self._gradient_state = accelerator.gradient_state
        self._models_compared = False
        self._watched: dict[torch.optim.Optimizer, list[nn.Module]] = {}

    def watch(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> None:
        """Compare before the next step of `optimizer`, if there are several ranks by then.

        Args:
            optimizer: any optimizer.
            models: the list of the accelerator's models, which give parameters their names. Until the step it may grow.
        """
        if (self._num_processes > 1 or torch.distributed.is_initialized()) and optimizer not in self._watched:
            self._watched[optimizer] = models
            optimizer.register_step_pre_hook(self._before_step)

    def compare_models(self, models: list[nn.Module]) -> None:
        """Compare the parameters before the first backward pass: names, dtypes, shapes, and which of them are frozen.

        For the gradient of a parameter that one rank has frozen since `prepare`, the others would wait forever.

        Args:
            models: the models that are trained, in the same order on all ranks.

        Raises:
            RuntimeError: on every rank; the message names the ranks and the difference.
        """
        if self._watched and not self._models_compared and trains_on_several_ranks(self._num_processes, models):
            self._models_compared = True
            check_same_settings({name: value for model in models for name, value in model_settings(model).items()})

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.compare(optimizer, getattr(optimizer, "limit", None))

    def compare(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        """Compare the optimizer's class, settings, parameters and their values, if it is watched; stop watching it.

        Args:
            optimizer: any optimizer.
            max_grad_norm: the norm to which its next step clips, or None.

        Raises:
            RuntimeError: on every rank; the message names the ranks and the difference.
        """
        models = self._watched.pop(optimizer, None)
        if models is None or not trains_on_several_ranks(self._num_processes, models):
            return
        names = {param: name for model in models for name, param in synchronized_parameters(model)}
        check_same_settings(
            {
                "max_grad_norm": to_plain_value(max_grad_norm),
                "gradient_accumulation_steps": self._gradient_state.num_steps,
                **optimizer_settings(optimizer, names),
            }
        )
        named = (
            (names[param], param) for group in optimizer.param_groups for param in group["params"] if param in names
        )
        # Other optimizers may keep a different part of their state on each rank.
        with_its_state = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
        if with_its_state is not None:
            with_its_state.finish_host_steps()  # of parameters whose gradients were released
        difference = find_replica_difference(named, with_its_state)
        of_ranks = gather_if_different(difference) or [difference]  # replicas of shards are in several groups
        if any(of_ranks):
            raise RuntimeError(
                f"before the first step, {next(filter(None, of_ranks))}: start all ranks from the same weights"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": {}}  # torch pickles optimizers without hooks
