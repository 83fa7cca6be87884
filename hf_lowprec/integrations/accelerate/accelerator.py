"""`prepare_accelerator`: FP32-accumulated gradients on an `accelerate.Accelerator`, under DDP, FSDP2 and HSDP.

It gives that one accelerator a state of its own and wraps its methods, listed at the end of this file.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting import return_float32
from hf_lowprec.casting.earlier_casts import PREPARED_UNCAST, cast_dtypes
from hf_lowprec.casting.losses import warn_if_in_16_bits
from hf_lowprec.casting.module_hooks import returns_float32
from hf_lowprec.casting.module_tree import compiled_module
from hf_lowprec.integrations.accelerate import private_apis, unsupported
from hf_lowprec.integrations.accelerate.rank_comparison import RankComparison, warn_of_different_weights
from hf_lowprec.integrations.carry_low_bits import TakenLowBits, give_low_bits, taken_low_bits
from hf_lowprec.integrations.export.parameter_names import write_model_description, write_parameter_names
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradients.collector import collector_of
from hf_lowprec.optim.param_groups import params_of, unwrap_optimizer
from hf_lowprec.optim.sharding import set_replicas
from hf_lowprec.reduction import fsdp2
from hf_lowprec.reduction.compare_ranks import synchronized_parameters
from hf_lowprec.reduction.ddp import averages_gradients, reduce_in_fp32
from hf_lowprec.reduction.fsdp2 import Reduction, reduce_scatter_in_fp32
from hf_lowprec.reduction.grad_accumulation import GradAccumulation, GradientAccumulator, check_grad_accumulation
from hf_lowprec.reduction.private_torch_apis import set_policy
from hf_lowprec.reduction.rank_mean import PartialGradients, average_gradients
from hf_lowprec.reduction.reduction_status import ReducedModel, ReductionStatus
from hf_lowprec.wrapped_method import wrap_method

AUTOCAST_OFF = "mixed precision: 'bf16' (the default of some Trainers) is off, because the model itself is BF16"

_STATUS = "_hf_lowprec"
"""The attribute of a prepared accelerator: its `ReductionStatus`, `RankComparison` and `PreparedModels`."""
logger = logging.getLogger(__name__)


def prepare_accelerator(
    accelerator: Accelerator, grad_accumulation: GradAccumulation = "nearest", reduction: Reduction = "rank_order"
) -> ReductionStatus:
    """Make `accelerator` sum gradients in FP32 under DDP, FSDP2 and HSDP. Call it before `accelerator.prepare`.

    - Gradients are sent in the parameters' dtype. Their mean over ranks is computed in FP32, in rank order, and rounded
      once. Under FSDP2, FP32 parameters (norms) form their own group, because FSDP2 requires one dtype per group.
    - `accelerator.clip_grad_norm_`, called with all parameters of an hf_lowprec optimizer, clips inside the optimizer's
      step, by an FP32 norm.
    - Models cast by `cast_model` return FP32 outputs to the training loop once they are prepared, as after
      `return_float32`.
    - Mixed precision "bf16" is turned off, because under FSDP2 it would make parameters FP32.
    - Ranks are compared when a model is prepared and before the first `backward` and step. If settings, parameters or
      replicated weights differ, every rank raises a `RuntimeError` that names the differences. Weights that differ
      before FSDP2 shards them cause a warning.
    - `accelerator.save_state` also saves the names of the optimizer's parameters and the model's configuration, which
      `hf-lowprec export` needs.

    With one process, only outputs, clipping, mixed precision and `grad_accumulation` are affected. Calling it again has
    no effect.

    Args:
        accelerator: an Accelerator that has not prepared a model yet.
        grad_accumulation: how the gradients of micro-batches are accumulated: `"nearest"` (as in torch, in the
            parameters' dtype) or `"fp32"` (4 bytes per parameter), which acts in `accelerator.backward`.
        reduction: how FSDP2 sums gradients over ranks: `"rank_order"` (by this package, with the same bits on every
            machine) or `"nccl"` (by NCCL in symmetric memory, in an order that NCCL chooses; needs NVLink).

    Returns:
        A status that is filled in as models are prepared. `print` it to see whether FP32 sums are active.

    Raises:
        ValueError: the accelerator's configuration does not allow gradients to be summed in FP32, or by NCCL if
            `reduction` is "nccl"; or the accelerator has already prepared a model under DDP, FSDP2 or autocast, or any
            model if `grad_accumulation` is not "nearest".
    """
    check_grad_accumulation(grad_accumulation)
    fsdp2.check_reduction(reduction)
    if hasattr(accelerator, _STATUS):
        earlier, *_ = accelerator._hf_lowprec
        for name, value in (("grad_accumulation", grad_accumulation), ("reduction", reduction)):
            if getattr(earlier, name) != value:
                raise ValueError(f"the accelerator was already prepared with {name}={getattr(earlier, name)!r}")
        return earlier
    unsupported.check_setup(accelerator, grad_accumulation, reduction)
    models = private_apis.prepared_models(accelerator)
    unsupported.check_prepared_models(models, grad_accumulation)
    for model in models:  # prepared but not wrapped, so they can still be changed
        _return_float32_if_cast(model)
        _forbid_later_cast(model)
    status = ReductionStatus(grad_accumulation, reduction)
    if accelerator.parallelism_config is not None and accelerator.parallelism_config.cp_enabled:
        status.notes.append(
            f"context parallelism over {accelerator.parallelism_config.cp_size} ranks: gradients are summed over them "
            "as well; torch's attention for it needs GPUs, on which this package has not been tested"
        )
    if private_apis.switch_autocast_off(accelerator):
        logger.warning("hf_lowprec: %s", AUTOCAST_OFF)
    if note := unsupported.describe_separate_processes(accelerator):
        status.notes.append(note)
        logger.warning("hf_lowprec: %s", note)
    comparison = RankComparison(accelerator, status)
    setattr(accelerator, _STATUS, (status, comparison, PreparedModels()))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from hf_lowprec.integrations.deepspeed.initialize import set_up_deepspeed

        set_up_deepspeed(accelerator, status)
        return status
    for name, method in _METHODS.items():
        wrap_method(accelerator, name, method)
    for name, method in _METHODS_OF_ACCELERATE.items():
        wrap_method(accelerator, name, method, Accelerator)
    for optimizer in private_apis.prepared_optimizers(accelerator):
        comparison.watch(optimizer, models)
    return status


def is_evaluation(*args: Any, **kwargs: Any) -> bool:
    """Return whether `Accelerator.prepare_model` with these arguments after the model prepares it only to evaluate."""
    return bool(kwargs.get("evaluation_mode", len(args) > 1 and args[1]))


class PreparedModels(weakref.WeakSet):
    """The models of an accelerator whose gradients are already summed in FP32; a plain WeakSet does not pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


def _reduce_sharded_at_load(accelerator: Any, model: nn.Module) -> None:
    """Sum gradients in FP32 for a model that transformers has sharded over a device mesh while loading it.

    FSDP2 reduces the gradients of the parameters that it has sharded. Gradients of parameters that only tensor and
    expert parallelism have sharded are complete on their ranks. All others are summed here.

    Raises:
        ValueError: parallelism is not supported.
        RuntimeError: the ranks' models or settings differ.
    """
    status, comparison, _ = accelerator._hf_lowprec
    sizes: Any = model.config.distributed_config  # type: ignore[union-attr]
    unsupported.check_sizes(sizes)
    comparison.compare_models([model])
    for module, group, forward in private_apis.partial_gradients(model):
        partial = PartialGradients(module, group)
        partial.watch()
        module.forward = functools.partial(_watching, partial, forward)
    if status.grad_accumulation != "nearest":  # of what FSDP2 has not sharded
        status.accumulators.append(GradientAccumulator(model))
    if sizes.dp_size > 1:
        dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
        in_fp32 = sizes.dp_replicate_size > 1 or torch.float16 in dtypes or status.grad_accumulation == "fp32"
        set_policy(model, MixedPrecisionPolicy(reduce_dtype=torch.float32 if in_fp32 else None))
        scratch = reduce_scatter_in_fp32(model)
        fsdp2.reshard_after_evaluation(model)
        wrapper = "HSDP" if sizes.dp_replicate_size > 1 else "FSDP2"
        status.models.append(ReducedModel(wrapper, sizes.dp_size, scratch))
    if private_apis.trains_on_several_ranks(accelerator.num_processes, [model]):
        average_gradients(
            private_apis.replicated_parameters(model),
            functools.partial(getattr, accelerator.gradient_state, "sync_gradients"),
        )
    if sizes.tp_size > 1:
        status.notes.append(
            f"torch's tensor parallelism sums activations and their gradients over {sizes.tp_size} ranks in 16 bits"
        )


def _watching(partial: PartialGradients, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` of a module with partial gradients; FSDP2 may gather its parameters for the first time here."""
    if torch.is_grad_enabled():
        partial.watch()
    return forward(*args, **kwargs)


def _return_float32_if_cast(model: nn.Module) -> None:
    """Make a cast model return FP32, as it would under mixed precision; called before the model is wrapped."""
    if cast_dtypes(model):
        return_float32(model, next_to_loss=not returns_float32(compiled_module(model)))


def _forbid_later_cast(model: nn.Module) -> None:
    """Make `cast_model` reject a prepared model that is not cast: it would lack what `prepare` does for cast models."""
    if not cast_dtypes(model) and any(param.requires_grad for param in model.parameters()):
        PREPARED_UNCAST.add(model)


def _check_accumulated(status: ReductionStatus, *_: Any) -> None:
    """Check, before a step, that gradients were accumulated as requested.

    Raises:
        RuntimeError: they were not.
    """
    if not all(accumulator.was_active for accumulator in status.accumulators):
        raise RuntimeError(
            f"grad_accumulation={status.grad_accumulation!r} needs accelerator.backward(loss), which was not called "
            "before this step; call it instead of loss.backward()"
        )


def _prepare(original: Callable, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare`, in which FSDP2 shards a model.

    Raises:
        ValueError: the model cannot be sharded in groups of one dtype, or tensor parallelism is accelerate's own.
        RuntimeError: the ranks' models or settings differ.
    """
    status, comparison, prepared_models = accelerator._hf_lowprec
    model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
    if model is not None:
        unsupported.check_sharded_at_load(accelerator, model)
    if not accelerator.is_fsdp2 or model is None or model in prepared_models:
        return original(accelerator, *args, **kwargs)
    _return_float32_if_cast(model)
    comparison.compare_models([model])
    plugin = accelerator.state.fsdp_plugin
    if not plugin.cpu_ram_efficient_loading:  # with it, only rank 0 has weights yet
        warn_of_different_weights(accelerator, model)
    low_precision = {param.dtype for param in model.parameters() if param.requires_grad} - {torch.float32}
    replicated = bool(accelerator.parallelism_config and accelerator.parallelism_config.dp_replicate_enabled)
    if replicated or torch.float16 in low_precision or status.grad_accumulation == "fp32":
        # Gradients are reduced, and added up, in FP32.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    in_fp32 = fsdp2.fp32_modules(model)  # raises before accelerate takes the parameters from the optimizer

    def shard_fp32_modules(options: dict[str, Any]) -> set[nn.Module]:
        fsdp2.shard_together(in_fp32.values(), **options)
        return {child for module in in_fp32.values() for child in module.modules()}

    is_sharded = private_apis.is_sharded_model(model)
    grouping = nullcontext() if is_sharded else private_apis.before_fully_shard(shard_fp32_modules)
    with taken_low_bits(model) as low_bits, grouping:
        prepared = original(accelerator, *args, **kwargs)
    status.fp32_modules.extend(in_fp32)
    for optimizer in private_apis.prepared_optimizers(accelerator):
        if collector := collector_of(optimizer):
            collector.watch_parameters()  # accelerate has given it the shards
    sharded = private_apis.prepared_models(accelerator)[-1]
    give_low_bits(sharded, low_bits, accelerator.device)
    scratch = reduce_scatter_in_fp32(sharded, status.reduction)
    _forbid_later_cast(model)
    prepared_models.add(model)
    status.models.append(ReducedModel("HSDP" if replicated else "FSDP2", accelerator.num_processes, scratch))
    return prepared


def _prepare_model(original: Callable, accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare_model`, in which DDP wraps a model.

    Raises:
        RuntimeError: the ranks' models or settings differ.
    """
    status, comparison, prepared_models = accelerator._hf_lowprec
    if model in prepared_models:
        return original(accelerator, model, *args, **kwargs)
    _return_float32_if_cast(model)
    if private_apis.is_sharded_at_load(model):
        _reduce_sharded_at_load(accelerator, model)
        # It is neither wrapped nor sharded again.
        prepared = original(accelerator, model, device_placement=False, evaluation_mode=True)
        prepared_models.update((model, prepared))
        return prepared
    if is_evaluation(*args, **kwargs):
        with private_apis.without_prepared_mark(model):
            return original(accelerator, model, *args, **kwargs)
    comparison.compare_models([model])
    accumulator = None
    if status.grad_accumulation != "nearest":
        accumulator = GradientAccumulator(model)
        status.accumulators.append(accumulator)
    wrapped = {id(module) for module in model.modules()}
    several = accelerator.num_processes > 1
    taking: AbstractContextManager[TakenLowBits] = taken_low_bits(model) if several else nullcontext({})
    with taking as low_bits:
        prepared = original(accelerator, model, *args, **kwargs)
    if several:
        give_low_bits(prepared, low_bits, accelerator.device)
    for module in prepared.modules():
        if isinstance(module, DistributedDataParallel) and id(module) not in wrapped:
            averager = reduce_in_fp32(module)
            synchronized = (param for _, param in synchronized_parameters(module))
            set_replicas(synchronized, module.process_group, functools.partial(averages_gradients, weakref.ref(module)))
            averager.on_last_bucket = None if accumulator is None else accumulator.restart
            status.models.append(ReducedModel("DDP", accelerator.num_processes, averager.scratch))
    _forbid_later_cast(model)
    prepared_models.update((model, prepared))
    return prepared


def _prepare_optimizer(original: Callable, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare_optimizer`: compare the ranks before the first step.

    Raises:
        ValueError: the optimizer takes gradients that the accelerator would accumulate.
    """
    status, comparison, _ = accelerator._hf_lowprec
    unsupported.check_optimizer(accelerator, collector_of(unwrap_optimizer(optimizer)), status.grad_accumulation)
    if status.grad_accumulation != "nearest":
        unwrap_optimizer(optimizer).register_step_pre_hook(functools.partial(_check_accumulated, status))
    prepared = original(accelerator, optimizer, *args, **kwargs)
    comparison.watch(unwrap_optimizer(prepared), private_apis.prepared_models(accelerator))
    return prepared


def _backward(original: Callable, accelerator: Any, loss: Any, **kwargs: Any) -> Any:
    """`Accelerator.backward`: warn about a 16-bit loss; accumulate the gradients of what is trainable by now."""
    warn_if_in_16_bits(loss, "the training step", "compute it from predictions.float()")
    status, comparison, prepared_models = accelerator._hf_lowprec
    comparison.before_backward(
        [model for model in private_apis.prepared_models(accelerator) if model in prepared_models]
    )
    with ExitStack() as stack:
        for accumulator in status.accumulators:
            stack.enter_context(accumulator.active())
        return original(accelerator, loss, **kwargs)


def _save_state(original: Callable, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.save_state`: write a description of the state into its folder, whose name a hook receives."""

    def describe(models: list[nn.Module], weights: Any, folder: str) -> None:
        if models and accelerator.is_main_process:
            write_parameter_names(Path(folder), models[0], private_apis.prepared_optimizers(accelerator))
            write_model_description(Path(folder), models[0])

    hook = accelerator.register_save_state_pre_hook(describe)
    try:
        return original(accelerator, *args, **kwargs)
    finally:
        hook.remove()


def _no_sync(original: Callable, accelerator: Any, model: nn.Module) -> Any:
    """`Accelerator.no_sync`; with a single process, accelerate's own makes DDP synchronize every micro-batch."""
    if accelerator.num_processes == 1 and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return original(accelerator, model)


def _clip_grad_norm_(
    original: Callable, accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2
) -> Any:
    """`Accelerator.clip_grad_norm_`: clip all parameters of one of our optimizers inside its next step.

    Accelerate's own method runs for a subset of the parameters, for other norms and optimizers, and before the last
    micro-batch.

    Returns None if gradient release has freed the gradients and only their norm is requested, as Trainer does with
    `max_grad_norm=0`; Trainer then logs no norm.
    """
    _, comparison, _ = accelerator._hf_lowprec
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    ids = set(map(id, parameters))
    ids_with_grad = {id(param) for param in parameters if param.grad is not None}
    for optimizer in private_apis.prepared_optimizers(accelerator):
        stepped = params_of(optimizer)
        if (collector := collector_of(optimizer)) and not ids.isdisjoint(map(id, stepped)):
            if collector.accumulates and not accelerator.sync_gradients:
                raise RuntimeError(
                    f"clip_grad_norm_ was called before the last micro-batch, but {collector.argument} clips in the "
                    "step; call it only if accelerator.sync_gradients"
                )
            comparison.compare(optimizer, max_norm)
            is_unknown = collector.stepped_in_parts and max_norm == math.inf and optimizer.clip == "exact"
            return None if is_unknown else optimizer.clip_grad_norm_(max_norm)
        if ids_with_grad == {id(param) for param in stepped if param.grad is not None}:
            comparison.compare(optimizer, max_norm)  # the norm of shards is a collective, as this is
            # Before the last micro-batch, the gradients must be clipped at once: more will be added to them.
            if isinstance(optimizer, LowPrecisionOptimizer) and norm_type == 2 and accelerator.sync_gradients:
                return optimizer.clip_grad_norm_(max_norm)
    return original(accelerator, parameters, max_norm, norm_type)


_METHODS: dict[str, Callable] = {
    "prepare": _prepare,
    "prepare_model": _prepare_model,
    "prepare_optimizer": _prepare_optimizer,
    "backward": _backward,
    "save_state": _save_state,
}
"""Methods of a prepared accelerator and their replacements, which call the methods of a user's class."""
_METHODS_OF_ACCELERATE: dict[str, Callable] = {"no_sync": _no_sync, "clip_grad_norm_": _clip_grad_norm_}
"""The same for methods of accelerate's class, which a user's class calls through `super()`."""
