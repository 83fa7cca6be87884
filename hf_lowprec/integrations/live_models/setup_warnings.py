"""Warnings before an optimizer's first step: it trains something else than was asked, or gradients lose digits.

Most come from a line that stands in the wrong place, and name it. Each is given once per process. An optimizer gets
only parameters, so their model is searched for among all live modules.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.fp32_rules.rotary import is_rotary
from hf_lowprec.casting.hooks.module_hooks import upcasts_inputs
from hf_lowprec.casting.quantized import holds_quantized_weights
from hf_lowprec.integrations.live_models.live_modules import live_modules
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.reduction.private_torch_apis import comm_hook_states, reduce_scatters_in_16_bits
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_MATRIX = 1024
"""Matrices with fewer elements train in FP32 without a warning."""
_SEARCHES = 8
"""Limit of searches of each kind (0.1 s each) per process, since there may be one optimizer per parameter."""
_AVERAGES = re.compile("AveragedModel|Ema|EMA")
"""In names of classes: torch's, timm's `ModelEmaV3`, and others."""
_CONVERSIONS = "model.to(torch.bfloat16) or Lightning's precision='bf16-true'"
_searches: Counter[Callable[..., str | None]] = Counter()
"""Searches of each kind so far; `_SEARCHES` once its warning was given."""

logger = logging.getLogger(__name__)


def warn_before_first_step(optimizer: LowPrecisionOptimizer) -> None:
    """Give the warnings of this file that apply to `optimizer`.

    One of `LowPrecisionOptimizer.first_step_checks`. It does not warn about FP32 parameters of a model that is cast,
    quantized or partly in 16 bits (norms, adapters, heads), nor about DDP with any communication hook.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and dist.get_rank() != 0:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    in_16_bits = [param for param in params if param.dtype in LOW_PRECISION_DTYPES]
    without_grad = [param for param in params if param.requires_grad and not _has_gradient(optimizer, param)]
    if without_grad:
        _warn_if_found(_replaced_parameters, without_grad, len(params))
    if "deepspeed" in sys.modules:
        _warn_if_found(_inside_deepspeed, params, optimizer)
    if any(param.dim() == 1 for param in in_16_bits):
        _warn_if_found(_converted_as_a_whole, in_16_bits)
    if in_16_bits:
        _warn_if_found(_rounded_average, in_16_bits)
    if not in_16_bits and any(param.dim() > 1 and param.numel() >= _MATRIX for param in params):
        _warn_if_found(_uncast_model, params)
    if in_16_bits and ranks > 1:
        _warn_if_found(_fsdp2_sums if any(map(is_sharded, in_16_bits)) else _ddp_sums, in_16_bits)


def _has_gradient(optimizer: LowPrecisionOptimizer, param: Tensor) -> bool:
    taken = optimizer.collector is not None and optimizer.collector.has_taken(param)
    return taken or param.grad is not None


def _warn_if_found(find: Callable[..., str | None], params: list[Tensor], *further: Any) -> None:
    """Log the warning that `find` returns for `params`. Stops searching after that, or after `_SEARCHES` searches."""
    if _searches[find] == _SEARCHES:
        return
    _searches[find] += 1
    if text := find(params, *further):
        _searches[find] = _SEARCHES
        logger.warning("hf_lowprec: %s", text)


def _inside_deepspeed(params: list[Tensor], optimizer: LowPrecisionOptimizer) -> str | None:
    """Warn if `deepspeed.initialize` was called with the optimizer itself, whose `params` are partitions then."""
    engines = (one for one in gc.get_objects() if str(type(one).__module__).startswith("deepspeed.runtime."))
    if not any(getattr(one, "optimizer", None) is optimizer for one in engines):
        return None
    copies = "" if params[0].dtype in LOW_PRECISION_DTYPES else ", and weights and states are copied to FP32"
    return (
        f"DeepSpeed steps partitions of the parameters with this {type(optimizer).__name__}, which takes them for "
        "whole ones: all ranks draw the same random bits, gradients are summed in 16 bits, clipping rounds them"
        f"{copies}. Call hf_lowprec.initialize_deepspeed(model, optimizer, config) in place of deepspeed.initialize; "
        "with Accelerate, call hf_lowprec.prepare_accelerator(accelerator) before accelerator.prepare"
    )


def _replaced_parameters(without_grad: list[Tensor], count: int) -> str | None:
    """Warn if some of an optimizer's parameters have no gradient and are in no module: others took their place.

    Args:
        without_grad: the trainable parameters without gradients.
        count: the number of all parameters.
    """
    in_modules = {id(param) for module in live_modules() for param in module._parameters.values()}
    replaced = [param for param in without_grad if id(param) not in in_modules]
    if not replaced:
        return None
    return (
        f"{len(replaced)} of the optimizer's {count} parameters (shape {tuple(replaced[0].shape)}, …) have no "
        "gradient and are no longer in any module: they were replaced after the optimizer was built, for example by "
        "model.resize_token_embeddings or fully_shard. The new parameters are not trained; build the optimizer after "
        "that line"
    )


def _converted_as_a_whole(params: list[Tensor]) -> str | None:
    """Warn if modules are in 16 bits that a cast of the model of the 16-bit `params` has kept in FP32, or would keep.

    Without a cast, only rotary embeddings count: theirs is the error that training cannot correct.
    """
    modules = [module for model in _models_of(params) for module in model.modules()]
    kept = [type(m).__name__ for m in modules if upcasts_inputs(m) and _in_16_bits(m._parameters)]
    if kept:
        return (
            f"{len(kept)} modules that cast_model has kept in FP32 ({kept[0]}, …) are in 16 bits: the model was "
            f"converted after the cast, as with {_CONVERSIONS}. Remove that line, since cast_model has converted "
            "everything else"
        )
    rotary = [type(m).__name__ for m in modules if is_rotary(m) and _in_16_bits(m._buffers)]
    if rotary:
        return (
            f"rotary embeddings ({rotary[0]}) are in 16 bits and encode wrong positions: the model was converted as a "
            f"whole, as with {_CONVERSIONS}. Call hf_lowprec.cast_model(model) instead of that line, or after it"
        )
    return None


def _in_16_bits(tensors: Mapping[str, Tensor | None]) -> bool:
    return any(tensor is not None and tensor.dtype in LOW_PRECISION_DTYPES for tensor in tensors.values())


def _rounded_average(params: list[Tensor]) -> str | None:
    """Warn if a class of another library averages weights in 16 bits. Modules that hold any of `params` are trained."""
    averages = (module for module in live_modules() if _AVERAGES.search(type(module).__name__))
    for module in averages:
        if _in_16_bits(dict(module.named_parameters())) and not _holding(params, [module]):
            return (
                f"{type(module).__name__} averages weights in 16 bits, which rounds away most of each update. Use "
                "hf_lowprec.AveragedModel(model), and update_parameters(model, optimizer), which average in FP32"
            )
    return None


def _uncast_model(params: list[Tensor]) -> str | None:
    """Warn if `params`, all of them FP32, belong to a model that was never cast."""
    if not _in_fp32_model(params):
        return None
    return (
        "the model is FP32 throughout, so it trains in FP32; it was never cast. For BF16, call "
        "hf_lowprec.cast_model(model) before building the optimizer; with Trainer, set optim= to one of "
        "hf_lowprec.OPTIMIZER_NAMES or pass callbacks=[hf_lowprec.LowPrecisionCallback()]"
    )


def _in_fp32_model(params: list[Tensor]) -> bool:
    """Return whether `params` belong to models without anything cast, quantized or in 16 bits."""
    models = _models_of(params)
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    plain = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tensors if tensor.is_floating_point())
    modules = (module for model in models for module in model.modules())
    return (
        bool(models) and plain and not any(map(holds_quantized_weights, modules)) and not any(map(cast_dtypes, models))
    )


def _ddp_sums(params: list[Tensor]) -> str | None:
    """Warn if DDP sums gradients of the 16-bit `params` over several ranks without a communication hook."""
    wrappers = (module for module in live_modules() if issubclass(type(module), DistributedDataParallel))
    summing = (module for module in wrappers if not comm_hook_states(module) and module.process_group.size() > 1)
    if not _holding(params, summing):
        return None
    return (
        "DistributedDataParallel sums 16-bit gradients over ranks in 16 bits. For FP32 sums, call "
        "hf_lowprec.prepare_accelerator(accelerator) before accelerator.prepare or, without Accelerate, "
        "hf_lowprec.reduction.reduce_in_fp32(model) on the wrapped model"
    )


def _fsdp2_sums(params: list[Tensor]) -> str | None:
    """Warn if FSDP2 sums gradients of the 16-bit `params` over several ranks by torch's own reduce-scatter."""
    sharded = (module for module in live_modules() if issubclass(type(module), FSDPModule))
    if not _holding(params, filter(reduce_scatters_in_16_bits, sharded)):
        return None
    return (
        "FSDP2 sums 16-bit gradients over ranks in 16 bits. For FP32 sums, call "
        "hf_lowprec.prepare_accelerator(accelerator) before accelerator.prepare or, without Accelerate, "
        "hf_lowprec.reduction.reduce_scatter_in_fp32(model) after the last fully_shard"
    )


def _models_of(params: list[Tensor]) -> list[nn.Module]:
    """The outermost modules that hold any of `params`."""
    modules = live_modules()
    inner = {id(child) for module in modules for child in module._modules.values()}
    return _holding(params, (module for module in modules if id(module) not in inner))


def _holding(params: list[Tensor], modules: Iterable[Any]) -> list[Any]:
    """Those of `modules` that hold any of `params`, directly or in modules inside."""
    ids = set(map(id, params))
    return [module for module in modules if any(id(param) in ids for param in module.parameters())]
