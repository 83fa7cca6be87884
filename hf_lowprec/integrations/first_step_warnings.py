"""Two warnings before an optimizer's first step: the model was never cast, or DDP sums its gradients in 16 bits.

Each is given once per process. An optimizer gets only parameters, so their model is searched for among all live
modules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.quantized import holds_quantized_weights
from hf_lowprec.integrations import private_apis
from hf_lowprec.integrations.live_modules import live_modules
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import is_sharded

_MATRIX = 1024
"""Matrices with fewer elements train in FP32 without a warning."""
_SEARCHES = 8
"""How often a process searches for models (0.1 s each), since there may be one optimizer per parameter."""

_UNCAST = (
    "the model is FP32 throughout, so it trains in FP32; it was never cast. For BF16, call "
    "hf_lowprec.cast_model(model) before building the optimizer; with Trainer, set optim= to one of "
    "hf_lowprec.OPTIMIZER_NAMES or pass callbacks=[hf_lowprec.LowPrecisionCallback()]"
)
_SUMS_IN_16_BITS = (
    "DistributedDataParallel sums 16-bit gradients over ranks in 16 bits. For FP32 sums, call "
    "hf_lowprec.prepare_accelerator(accelerator) before accelerator.prepare or, without Accelerate, "
    "hf_lowprec.reduction.reduce_in_fp32(model) on the wrapped model"
)
_searches_left = {_UNCAST: _SEARCHES, _SUMS_IN_16_BITS: _SEARCHES}
"""Warning -> number of searches left."""
logger = logging.getLogger(__name__)


def warn_before_first_step(optimizer: LowPrecisionOptimizer) -> None:
    """Warn if the model of `optimizer` trains in FP32, or if its gradients are summed in 16 bits.

    One of `LowPrecisionOptimizer.first_step_checks`. It does not warn about FP32 parameters of a model that is cast,
    quantized or partly in 16 bits (norms, adapters, heads), nor about DDP with any communication hook.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and dist.get_rank() != 0:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(param.dtype == torch.float32 for param in params):
        if any(param.dim() > 1 and param.numel() >= _MATRIX for param in params):
            _warn_if(_in_fp32_model, params, _UNCAST)
    elif ranks > 1 and not any(map(is_sharded, params)):
        _warn_if(_reduced_in_16_bits, params, _SUMS_IN_16_BITS)


def _warn_if(condition: Callable[[list[Tensor]], bool], params: list[Tensor], text: str) -> None:
    """Log `text` once if `condition` holds for `params`. Stops checking after a number of searches."""
    if _searches_left[text] > 0:
        holds = condition(params)
        _searches_left[text] = 0 if holds else _searches_left[text] - 1
        if holds:
            logger.warning("hf_lowprec: %s", text)


def _in_fp32_model(params: list[Tensor]) -> bool:
    """Whether `params` belong to models in which nothing is cast, quantized or in 16 bits."""
    models = list(_models_of(params))
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    plain = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors if tensor.is_floating_point())
    quantized = any(holds_quantized_weights(module) for model in models for module in model.modules())
    return bool(models) and plain and not quantized and not any(map(cast_dtypes, models))


def _reduced_in_16_bits(params: list[Tensor]) -> bool:
    """Whether DDP sums 16-bit gradients of `params` over several ranks without a communication hook."""
    in_16_bits = {id(param) for param in params if param.dtype != torch.float32}
    wrapped = (module for module in live_modules() if issubclass(type(module), DistributedDataParallel))
    return any(
        any(id(param) in in_16_bits for param in module.parameters())
        and not private_apis.has_communication_hook(module)
        and module.process_group.size() > 1
        for module in wrapped
    )


def _models_of(params: list[Tensor]) -> Iterator[nn.Module]:
    """The outermost modules that hold any of `params`."""
    modules = live_modules()
    inner = {id(child) for module in modules for child in module._modules.values()}
    ids = set(map(id, params))
    for module in modules:
        if id(module) not in inner and any(id(param) in ids for param in module.parameters()):
            yield module
