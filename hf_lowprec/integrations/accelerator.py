"""`prepare_accelerator`: FP32-accumulated gradients on an `accelerate.Accelerator`, whatever wraps the model."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting import return_float32
from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.integrations import seams
from hf_lowprec.integrations.beside import is_evaluation
from hf_lowprec.integrations.misuse import live_modules
from hf_lowprec.integrations.rank_comparison import RankComparison
from hf_lowprec.integrations.refusals import refuse_unsupported
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.reduction.ddp import reduce_in_fp32
from hf_lowprec.reduction.fsdp2 import fp32_modules, reduce_scatter_in_fp32, shard_together
from hf_lowprec.reduction.grad_accumulation import GradientAccumulator, check_grad_accumulation
from hf_lowprec.reduction.object_gather import gather_objects
from hf_lowprec.reduction.replicas import find_replica_difference, synchronized_parameters
from hf_lowprec.reduction.same_settings import check_same_settings, model_settings
from hf_lowprec.reduction.status import ReducedModel, ReductionStatus
from hf_lowprec.reduction.unwrap_optimizer import unwrap_optimizer

AUTOCAST_OFF = "mixed precision: 'bf16' was asked for and is off; the model itself is BF16"

logger = logging.getLogger(__name__)


def prepare_accelerator(accelerator: Accelerator, grad_accumulation: str = "nearest") -> ReductionStatus:
    """Let `accelerator` sum gradients in FP32, under DDP, FSDP2 and HSDP; call it before `accelerator.prepare`.

    - Gradients travel in the parameters' dtype. The mean over ranks is summed in FP32, in rank order, and rounded once.
      Under FSDP2, FP32 parameters (norms) become a group of their own, because torch wants one dtype per group.
    - `accelerator.clip_grad_norm_` of all parameters of one of our optimizers clips inside its step, by an FP32 norm.
    - Models that `cast_model` has cast return FP32 to the loop once they are prepared, as by `return_float32`.
    - Mixed precision "bf16" is switched off: under FSDP2 it would make parameters FP32.
    - Ranks are compared when a model is prepared and before an optimizer's first step. Settings, parameters or
      replicated weights that differ are a `RuntimeError` on every rank that names them; weights that differ before
      FSDP2 shards them are a warning.

    With one process, only outputs, mixed precision and `grad_accumulation` are affected. A second call changes nothing.

    Args:
        accelerator: an Accelerator that has not prepared a model yet.
        grad_accumulation: how micro-batches are added up: `"nearest"` (as torch does, in the parameters' dtype),
            `"kahan"` (with a 16-bit residual, 2 bytes per parameter) or `"fp32"` (4 bytes per parameter).

    Returns:
        What is done, filled as models are prepared. `print` it to see whether it is active.

    Raises:
        ValueError: the accelerator is configured for something in which gradients would not be summed in FP32, or DDP
            or FSDP2 has wrapped one of its models already.
    """
    check_grad_accumulation(grad_accumulation)
    done: ReductionStatus | None = getattr(accelerator, "_hf_lowprec", None)
    if done is not None:
        if done.grad_accumulation != grad_accumulation:
            raise ValueError(f"the accelerator was prepared with grad_accumulation={done.grad_accumulation!r}")
        return done
    refuse_unsupported(accelerator, grad_accumulation)
    prepared = seams.prepared_models(accelerator)
    if any(isinstance(model, DistributedDataParallel | FSDPModule) for model in prepared) or _any_in_ddp(prepared):
        raise ValueError("a model was prepared already; call prepare_accelerator before accelerator.prepare")
    for model in prepared:  # with one process that is early enough
        _return_float32_if_cast(model)
    reduction = ReductionStatus(grad_accumulation)
    if seams.switch_autocast_off(accelerator):
        say_autocast_is_off(reduction)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > accelerator.num_processes:
        reduction.notes.append(
            f"{started} processes were started (WORLD_SIZE), and accelerate trains with {accelerator.num_processes}: "
            "each trains alone. Without GPUs start the script with --use_cpu, or Accelerator(cpu=True)"
        )
        logger.warning("hf_lowprec: %s", reduction.notes[-1])
    accelerator._hf_lowprec = reduction
    known = _Models()
    comparison = RankComparison(accelerator)
    wrap_method(accelerator, "prepare", functools.partial(_prepare, accelerator, reduction, known))
    wrap_method(accelerator, "prepare_model", functools.partial(_prepare_model, accelerator, reduction, known))
    wrap_method(accelerator, "prepare_optimizer", functools.partial(_prepare_optimizer, comparison))
    wrap_method(accelerator, "no_sync", functools.partial(_no_sync, accelerator))
    wrap_method(accelerator, "clip_grad_norm_", functools.partial(_clip_grad_norm_, accelerator, comparison))
    return reduction


def _any_in_ddp(models: list[nn.Module]) -> bool:
    """Whether DDP wraps any of `models`; accelerate keeps those that it wraps, and not the wrappers."""
    if not models:  # the search takes a tenth of a second
        return False
    wrappers = (module for module in live_modules() if issubclass(type(module), DistributedDataParallel))
    return any(getattr(wrapper, "module", None) is model for wrapper in wrappers for model in models)


def say_autocast_is_off(reduction: ReductionStatus) -> None:
    """Note that mixed precision was asked for and is off, and log it."""
    reduction.notes.append(AUTOCAST_OFF)
    logger.warning("hf_lowprec: %s", AUTOCAST_OFF)


def wrap_method(instance: object, name: str, wrapper: Callable) -> None:
    """Let `wrapper(original, *args, **kwargs)` answer for the method `name` of this one instance."""
    setattr(instance, name, _Method(instance, name, wrapper))


class _Method:
    """A method of one instance inside a wrapper; unlike a closure it pickles along with the instance."""

    def __init__(self, instance: object, name: str, wrapper: Callable) -> None:
        wrapped_before = vars(instance).get(name)
        self.__setstate__((instance, name, wrapper, wrapped_before))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._original, *args, **kwargs)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._instance, self._name, self._wrapper, self._wrapped_before

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._instance, self._name, self._wrapper, self._wrapped_before = state
        # Not the bound method's own pickle, which would look the name up in the instance and find this object.
        method = MethodType(getattr(type(self._instance), self._name), self._instance)
        self._original: Callable = self._wrapped_before or method
        functools.update_wrapper(self, self._original, updated=())


class _Models(weakref.WeakSet):
    """Models whose gradients are taken care of; a plain WeakSet does not pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


def _prepare(
    accelerator: Accelerator, reduction: ReductionStatus, known: _Models, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """`Accelerator.prepare`, which is where FSDP2 is applied."""
    model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
    if not accelerator.is_fsdp2 or model is None or model in known:
        return original(*args, **kwargs)
    _return_float32_if_cast(model)
    _compare_models(accelerator, reduction, model)
    if not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # then rank 0's are loaded, and others empty
        _warn_of_different_weights(accelerator, model)
    halves = {param.dtype for param in model.parameters() if param.requires_grad} - {torch.float32}
    replicated = bool(accelerator.parallelism_config and accelerator.parallelism_config.dp_replicate_enabled)
    if replicated or torch.float16 in halves or reduction.grad_accumulation == "fp32":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    apart = fp32_modules(model)  # refuses a model before accelerate takes the parameters from its optimizer

    def first(options: dict[str, Any]) -> set[nn.Module]:
        shard_together(apart.values(), **options)
        return {below for module in apart.values() for below in module.modules()}

    with nullcontext() if seams.is_sharded_model(model) else seams.before_fully_shard(first):
        prepared = original(*args, **kwargs)
    reduction.fp32_modules.extend(apart)
    scratch = reduce_scatter_in_fp32(seams.prepared_models(accelerator)[-1])
    known.add(model)
    reduction.models.append(ReducedModel("HSDP" if replicated else "FSDP2", accelerator.num_processes, scratch))
    return prepared


def _prepare_model(
    accelerator: Accelerator,
    reduction: ReductionStatus,
    known: _Models,
    original: Callable,
    model: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`Accelerator.prepare_model`, which is where DDP wraps a model."""
    if model in known:
        return original(model, *args, **kwargs)
    _return_float32_if_cast(model)
    if is_evaluation(*args, **kwargs):
        with seams.prepared_again_later(model):
            return original(model, *args, **kwargs)
    _compare_models(accelerator, reduction, model)
    accumulator = None
    if reduction.grad_accumulation != "nearest":
        accumulator = GradientAccumulator(model, reduction.grad_accumulation)
        reduction.accumulators.append(accumulator)
    wrapped = {id(module) for module in model.modules()}
    prepared = original(model, *args, **kwargs)
    for module in prepared.modules():
        if isinstance(module, DistributedDataParallel) and id(module) not in wrapped:
            averager = reduce_in_fp32(module)
            averager.on_last_bucket = None if accumulator is None else accumulator.restart
            reduction.models.append(ReducedModel("DDP", accelerator.num_processes, averager.scratch))
    known.update((model, prepared))
    return prepared


def _compare_models(accelerator: Accelerator, reduction: ReductionStatus, model: nn.Module) -> None:
    """Compare what is to be wrapped, while ranks that differ can still tell each other so."""
    if accelerator.num_processes > 1 and any(param.requires_grad for param in model.parameters()):
        check_same_settings({"grad_accumulation": reduction.grad_accumulation, **model_settings(model)})


def _warn_of_different_weights(accelerator: Accelerator, model: nn.Module) -> None:
    """FSDP2 keeps each rank's own shard, unlike DDP, which broadcasts rank 0's weights."""
    if accelerator.num_processes == 1 or any(gather_objects(any(param.is_meta for param in model.parameters()))):
        return  # weights of a model on the meta device are loaded after sharding
    ignored = seams.ignored_by_fsdp2(accelerator, model)
    found = find_replica_difference(
        (name, param) for name, param in synchronized_parameters(model) if param not in ignored
    )
    if found is not None and accelerator.is_main_process:
        logger.warning(
            "hf_lowprec: before sharding, %s: FSDP2 would train a mixture of the ranks' weights. Seed all ranks alike "
            "before the model is built, load the same checkpoint, or set cpu_ram_efficient_loading to start from "
            "rank 0's",
            found,
        )


def _prepare_optimizer(comparison: RankComparison, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare_optimizer`: ranks are compared before the first step."""
    prepared = original(*args, **kwargs)
    comparison.watch(unwrap_optimizer(prepared))
    return prepared


def _return_float32_if_cast(model: nn.Module) -> None:
    """Return FP32 from a cast model, as mixed precision would. Runs before the model is wrapped."""
    if cast_dtypes(model):
        return_float32(model)


def _no_sync(accelerator: Accelerator, original: Callable, model: nn.Module) -> Any:
    """`Accelerator.no_sync`, which leaves DDP over a single process to synchronize every micro-batch."""
    if accelerator.num_processes == 1 and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return original(model)


def _clip_grad_norm_(
    accelerator: Accelerator,
    comparison: RankComparison,
    original: Callable,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = {id(param) for param in parameters if param.grad is not None}
    for optimizer in seams.prepared_optimizers(accelerator):
        groups = optimizer.param_groups
        if wanted == {id(p) for group in groups for p in group["params"] if p.grad is not None}:
            comparison.compare(optimizer, max_norm)  # the norm of shards is a collective, as the comparison is
            # More gradients come where this is not the last micro-batch; what is added to must be clipped at once.
            if isinstance(optimizer, LowPrecisionOptimizer) and norm_type == 2 and accelerator.sync_gradients:
                return optimizer.clip_grad_norm_(max_norm)
    return original(parameters, max_norm, norm_type)
