"""Warnings, each given once before the first step: a model nobody cast trains in FP32; DDP sums gradients in 16 bits.

An optimizer is given parameters and not their model, so that is looked up among the modules that Python keeps track of.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.quantized import holds_quantized_weights
from hf_lowprec.integrations import seams
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import is_sharded

_MATRIX = 1024
"""Elements of a matrix from which on its format matters."""
_SEARCHES = 8
"""How often models are looked up in a process, a tenth of a second each: there may be an optimizer per parameter."""

_UNCAST = (
    "the model is FP32 throughout, so it trains in FP32; it was never cast. For BF16 call "
    "hf_lowprec.cast_model(model) before the optimizer is built; under Trainer set optim= to one of "
    "hf_lowprec.OPTIMIZER_NAMES or pass callbacks=[hf_lowprec.LowPrecisionCallback()]"
)
_SUMS_IN_16_BITS = (
    "DistributedDataParallel sums 16-bit gradients over ranks in 16 bits. For FP32 sums call "
    "hf_lowprec.prepare_accelerator(accelerator) before accelerator.prepare, or without Accelerate "
    "hf_lowprec.reduction.reduce_in_fp32(model) of the wrapped model"
)
_searches_left = {_UNCAST: _SEARCHES, _SUMS_IN_16_BITS: _SEARCHES}
"""Warning -> searches left."""
logger = logging.getLogger(__name__)


def warn_of_misuse(optimizer: LowPrecisionOptimizer) -> None:
    """Say, once in a process, that a model trains in FP32 or that its gradients are summed in 16 bits.

    FP32 parameters of a model that is cast, quantized or partly in 16 bits (norms, adapters, heads) are as they should
    be, and so is DDP with any communication hook.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and dist.get_rank() != 0:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(param.dtype == torch.float32 for param in params):
        if any(param.dim() > 1 and param.numel() >= _MATRIX for param in params):
            _say_if(_in_fp32_model, params, _UNCAST)
    elif ranks > 1 and not any(map(is_sharded, params)):
        _say_if(_reduced_in_16_bits, params, _SUMS_IN_16_BITS)


def _say_if(happens: Callable[[list[Tensor]], bool], params: list[Tensor], text: str) -> None:
    if _searches_left[text] > 0:
        said = happens(params)
        _searches_left[text] = 0 if said else _searches_left[text] - 1
        if said:
            logger.warning("hf_lowprec: %s", text)


def _in_fp32_model(params: list[Tensor]) -> bool:
    """Whether `params` belong to models, and nothing in those is cast, quantized or in 16 bits."""
    models = list(_models_of(params))
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    plain = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors if tensor.is_floating_point())
    quantized = any(holds_quantized_weights(module) for model in models for module in model.modules())
    return bool(models) and plain and not quantized and not any(map(cast_dtypes, models))


def _reduced_in_16_bits(params: list[Tensor]) -> bool:
    """Whether DDP reduces 16-bit gradients of `params` over several ranks by itself."""
    halves = {id(param) for param in params if param.dtype != torch.float32}
    wrapped = (module for module in live_modules() if issubclass(type(module), DistributedDataParallel))
    return any(
        any(id(param) in halves for param in module.parameters())
        and not seams.has_communication_hook(module)
        and module.process_group.size() > 1
        for module in wrapped
    )


def _models_of(params: list[Tensor]) -> Iterator[nn.Module]:
    """The outermost modules that hold any of `params`."""
    modules = live_modules()
    inner = {id(child) for module in modules for child in module._modules.values()}
    wanted = set(map(id, params))
    for module in modules:
        if id(module) not in inner and any(id(param) in wanted for param in module.parameters()):
            yield module


def live_modules() -> list[Any]:
    """Every module of the process that is past its constructor."""
    # Not isinstance, which asks proxies for what they stand for.
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [module for module in found if "_modules" in vars(module)]
