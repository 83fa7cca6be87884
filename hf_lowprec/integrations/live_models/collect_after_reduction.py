"""Connects gradient collectors with data parallelism: no gradient is taken before it is averaged over ranks.

FSDP2 runs the hooks of a parameter after its reduce-scatter, so nothing is to be done for it. DDP runs them before, so
its communication hook hands over the averages. An optimizer gets only parameters, so the wrappers of their model are
searched for among all live modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.integrations.live_models.live_modules import live_modules
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release.collector import GradientCollector
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.reduction.ddp import hand_over_means


def collect_after_reduction(optimizer: LowPrecisionOptimizer) -> None:
    """Make `optimizer` wait for the averages of parameters that DDP synchronizes.

    One of `LowPrecisionOptimizer.first_gradient_checks`.

    Raises:
        RuntimeError: a model is wrapped by FSDP1, or by DDP in a way that does not tell when averages are there.
    """
    collector = optimizer.collector
    if collector is None or not (dist.is_available() and dist.is_initialized()):
        return
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    plain = {id(param) for param in params if not is_sharded(param)}
    for module in live_modules() if plain else ():
        if not issubclass(type(module), DistributedDataParallel | FullyShardedDataParallel):
            continue
        reduced = [param for param in module.parameters() if id(param) in plain]
        if reduced and issubclass(type(module), FullyShardedDataParallel):
            raise RuntimeError(
                f"{collector.argument} does not support FSDP1, whose gradients are final only after its own hooks; use "
                "FSDP2 (fully_shard, or fsdp_version: 2 in the accelerate configuration)"
            )
        if reduced:
            hand_over_means(module, _weakly(collector), collector.argument)
            collector.average_later(reduced)


def _weakly(collector: GradientCollector) -> Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[bool]]:
    """`collector.take_means`, which takes nothing any more once the optimizer is deleted or has stopped collecting."""
    reference = weakref.ref(collector)

    def take_means(params: Sequence[Tensor], means: Sequence[Tensor]) -> Sequence[bool]:
        living = reference()
        return [False] * len(params) if living is None else living.take_means(params, means)

    return take_means
