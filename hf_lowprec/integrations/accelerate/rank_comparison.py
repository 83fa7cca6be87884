"""Compares the ranks before models are wrapped, before the first backward pass, and before an optimizer's first step.

With different models, collectives would wait forever; with different settings or weights, replicas would diverge.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_lowprec.integrations.accelerate.private_apis import ignored_by_fsdp2, trains_on_several_ranks
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.reduction import compare_ranks
from hf_lowprec.reduction.collectives import gather_if_different, gather_objects
from hf_lowprec.reduction.reduction_status import ReductionStatus

logger = logging.getLogger(__name__)


class RankComparison:
    """Compares the ranks of an accelerator. A difference is an error on every rank.

    Args:
        accelerator: provides the number of ranks and the settings. It keeps this object, which has no reference to it.
        status: the reductions that were requested.
    """

    def __init__(self, accelerator: Accelerator, status: ReductionStatus) -> None:
        self._num_processes = accelerator.num_processes
        self._gradient_state = accelerator.gradient_state
        self._settings = {"grad_accumulation": status.grad_accumulation, "reduction": status.reduction}
        self._models_compared = False
        self._watched: dict[torch.optim.Optimizer, list[nn.Module]] = {}

    def watch(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> None:
        """Compare before the next step of `optimizer`, if there are several ranks by then.

        Args:
            optimizer: any optimizer.
            models: the accelerator's list of models, which give parameters their names. It may grow until the step.
        """
        if (self._num_processes > 1 or torch.distributed.is_initialized()) and optimizer not in self._watched:
            self._watched[optimizer] = models
            optimizer.register_step_pre_hook(self._before_step)

    def compare_models(self, models: list[nn.Module]) -> None:
        """Compare the parameters of models that are about to be wrapped: names, dtypes, shapes, and what is frozen.

        Args:
            models: the models, in the same order on all ranks.

        Raises:
            RuntimeError: on every rank; the message names the ranks and the difference.
        """
        if trains_on_several_ranks(self._num_processes, models):
            of_models = {name: value for model in models for name, value in compare_ranks.model_settings(model).items()}
            compare_ranks.check_same_settings(self._settings | of_models)

    def before_backward(self, models: list[nn.Module]) -> None:
        """Call `compare_models` before the first backward pass.

        If one rank has frozen a parameter since `prepare`, the others would wait forever for its gradient.
        """
        if self._watched and not self._models_compared and trains_on_several_ranks(self._num_processes, models):
            self._models_compared = True
            self.compare_models(models)

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
        names = {param: name for model in models for name, param in compare_ranks.synchronized_parameters(model)}
        compare_ranks.check_same_settings(
            {
                "max_grad_norm": compare_ranks.to_plain_value(max_grad_norm),
                "gradient_accumulation_steps": self._gradient_state.num_steps,
                **compare_ranks.optimizer_settings(optimizer, names),
            }
        )
        params = (param for param in params_of(optimizer) if param in names)
        # Other optimizers may keep a different part of their state on each rank.
        with_its_state = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
        if with_its_state is not None:
            with_its_state.finish_host_steps()  # of parameters whose gradients were released
        named = ((names[param], param) for param in params)
        difference = compare_ranks.find_replica_difference(named, with_its_state)
        of_ranks = gather_if_different(difference) or [difference]  # replicas of shards are in several groups
        if any(of_ranks):
            raise RuntimeError(
                f"before the first step, {next(filter(None, of_ranks))}: start all ranks from the same weights"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watched": {}}  # torch pickles optimizers without hooks


def warn_of_different_weights(accelerator: Accelerator, model: nn.Module) -> None:
    """Warn if the ranks' weights differ before sharding.

    FSDP2 keeps each rank's own shard, unlike DDP, which broadcasts rank 0's weights.
    """
    if accelerator.num_processes == 1 or any(gather_objects(any(param.is_meta for param in model.parameters()))):
        return  # weights of a model on the meta device are loaded after sharding
    ignored = ignored_by_fsdp2(accelerator, model)
    difference = compare_ranks.find_replica_difference(
        (name, param) for name, param in compare_ranks.synchronized_parameters(model) if param not in ignored
    )
    if difference is not None and accelerator.is_main_process:
        logger.warning(
            "hf_lowprec: before sharding, %s: FSDP2 would train a mixture of the ranks' weights. Set the same seed on "
            "all ranks before building the model, load the same checkpoint, or set cpu_ram_efficient_loading to start "
            "from rank 0's",
            difference,
        )
