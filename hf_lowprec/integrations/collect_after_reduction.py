"""Connects gradient collectors with data parallelism: no gradient is taken before it is averaged over ranks.

FSDP2 runs the hooks of a parameter after its reduce-scatter, so it needs nothing. DDP runs them before, so its
communication hook hands over the averages. An optimizer gets only parameters, so the wrappers of their model are found
among all modules of the process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.optim.gradients.collector import GradientCollector
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.reduction.ddp import hand_over_means


def collect_after_reduction(collector: GradientCollector) -> None:
    """Make `collector` wait for the averages of parameters that DDP synchronizes. It calls this before it takes any.

    Raises:
        RuntimeError: a model is wrapped by FSDP1, or by DDP with settings that hide when averages are ready.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    plain = {id(param) for param in collector.params() if param.requires_grad and not is_sharded(param)}
    for module in data_parallel_wrappers() if plain else ():
        reduced = [param for param in module.parameters() if id(param) in plain]
        if reduced and issubclass(type(module), FullyShardedDataParallel):
            raise RuntimeError(
                f"{collector.argument} does not support FSDP1, whose gradients are final only after its own hooks; use "
                "FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate configuration)"
            )
        if reduced:
            hand_over_means(module, _weakly(collector), collector.argument)
            collector.average_later(reduced)


def data_parallel_wrappers() -> list[Any]:
    """Find every DDP and FSDP1 wrapper in the process. The search takes a tenth of a second."""
    kinds = DistributedDataParallel | FullyShardedDataParallel
    # Not isinstance, which is also true for a proxy of a module.
    found = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kinds)]
    return [module for module in found if "_modules" in vars(module)]


def _weakly(collector: GradientCollector) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[bool]]:
    """Wrap `collector.take_means` so that it takes nothing once the optimizer is deleted or has stopped collecting."""
    reference = weakref.ref(collector)

    def take_means(params: Sequence[Tensor], means: Sequence[Tensor]) -> Sequence[bool]:
        living = reference()
        return [False] * len(params) if living is None else living.take_means(params, means)

    return take_means
