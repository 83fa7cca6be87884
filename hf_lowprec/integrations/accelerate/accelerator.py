"""`prepare_accelerator`: FP32-accumulated gradients on an `accelerate.Accelerator`, under DDP, FSDP2 and HSDP.

It gives that one accelerator a class and a state of its own. Other accelerators and their class are not changed.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting import return_float32
from hf_lowprec.casting.earlier_casts import PREPARED_UNCAST, cast_dtypes, runs_under_autocast
from hf_lowprec.casting.losses import warn_if_in_16_bits
from hf_lowprec.casting.module_hooks import returns_float32
from hf_lowprec.casting.module_tree import compiled_module
from hf_lowprec.integrations.accelerate import private_apis
from hf_lowprec.integrations.accelerate.first_step_comparison import FirstStepComparison
from hf_lowprec.integrations.accelerate.unsupported import check_sharded_at_load, check_sizes, check_supported
from hf_lowprec.integrations.carry_low_bits import give_low_bits, returned_on_error, take_low_bits
from hf_lowprec.integrations.collect_after_reduction import data_parallel_wrappers
from hf_lowprec.integrations.deepspeed.config import set_bf16_flags
from hf_lowprec.integrations.export.parameter_names import write_model_description, write_parameter_names
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release.collector import collector_of
from hf_lowprec.optim.gradient_release.release import gradient_release_of
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer
from hf_lowprec.reduction.collectives import ScratchBuffers, gather_objects
from hf_lowprec.reduction.compare_ranks import (
    check_same_settings,
    find_replica_difference,
    model_settings,
    synchronized_parameters,
)
from hf_lowprec.reduction.ddp import reduce_in_fp32
from hf_lowprec.reduction.fsdp2 import (
    Reduction,
    check_reduction,
    fp32_modules,
    reduce_scatter_in_fp32,
    reshard_after_evaluation,
    shard_together,
)
from hf_lowprec.reduction.grad_accumulation import GradAccumulation, GradientAccumulator, check_grad_accumulation
from hf_lowprec.reduction.private_torch_apis import set_policy
from hf_lowprec.reduction.rank_mean import PartialGradients, average_gradients
from hf_lowprec.reduction.reduction_status import ReducedModel, ReductionStatus
from hf_lowprec.wrapped_method import temporarily_wrapped

AUTOCAST_OFF = "mixed precision: 'bf16' (the default of some Trainers) is off, because the model itself is BF16"

_PARTITIONED = {
    1: "all weights and gradients, and a part of the states",
    2: "all weights, and a part of gradients and states",
    3: "a part of weights, gradients and states",
}
"""By the stage of DeepSpeed's ZeRO, what a rank holds."""

logger = logging.getLogger(__name__)


def prepare_accelerator(
    accelerator: Accelerator, grad_accumulation: GradAccumulation = "nearest", reduction: Reduction = "rank_order"
) -> ReductionStatus:
    """Make `accelerator` sum gradients in FP32 under DDP, FSDP2 and HSDP. Call it before `accelerator.prepare`.

    - Gradients are sent in the parameters' dtype. Their mean over ranks is summed in FP32, in rank order, and rounded
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
            machine) or `"nccl"` (by NCCL in symmetric memory, in an order of its choice; needs NVLink).

    Returns:
        A status that is filled in as models are prepared. `print` it to see whether FP32 sums are active.

    Raises:
        ValueError: the accelerator's configuration does not allow gradients to be summed in FP32, or by NCCL if
            `reduction` asks for that, or it has already prepared a model under DDP, FSDP2 or autocast, or any model if
            `grad_accumulation` is not "nearest".
    """
    check_grad_accumulation(grad_accumulation)
    check_reduction(reduction)
    if isinstance(accelerator, _Prepared):
        earlier, *_ = accelerator._hf_lowprec
        for name, value in (("grad_accumulation", grad_accumulation), ("reduction", reduction)):
            if getattr(earlier, name) != value:
                raise ValueError(f"the accelerator was already prepared with {name}={getattr(earlier, name)!r}")
        return earlier
    check_supported(accelerator, grad_accumulation, reduction)
    models = private_apis.prepared_models(accelerator)
    _check_prepared_models(models, grad_accumulation)
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
    _warn_of_separate_processes(accelerator, status)
    comparison = FirstStepComparison(accelerator)
    accelerator._hf_lowprec = status, comparison, PreparedModels()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _configure_deepspeed(accelerator, status)
        accelerator.__class__ = _prepared_class(type(accelerator), _UnderDeepSpeed, _Prepared)
        return status
    accelerator.__class__ = _prepared_class(type(accelerator), _BeforeOverrides, _BehindOverrides)
    for optimizer in private_apis.prepared_optimizers(accelerator):
        comparison.watch(optimizer, models)
    return status


def _configure_deepspeed(accelerator: Accelerator, reduction: ReductionStatus) -> None:
    """Set in DeepSpeed's configuration what our optimizers need."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if changed := set_bf16_flags(config):
        reduction.notes.append(f"set in DeepSpeed's configuration: {', '.join(changed)}")
    if reduction.grad_accumulation == "fp32":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"


def _check_prepared_models(models: list[nn.Module], grad_accumulation: str) -> None:
    """Raise ValueError if one of `models`, which an accelerator has prepared, can no longer be changed as needed."""
    if any(isinstance(model, DistributedDataParallel | FSDPModule) for model in models) or _any_in_ddp(models):
        reason = "a model was already prepared"
    elif any(map(runs_under_autocast, models)):
        reason = "a model was already prepared with mixed precision, so it runs under autocast"
    elif grad_accumulation != "nearest" and any(p.requires_grad for model in models for p in model.parameters()):
        reason = f"a model was already prepared without grad_accumulation={grad_accumulation!r}"
    else:
        return
    raise ValueError(f"{reason}; call prepare_accelerator before accelerator.prepare")


def is_evaluation(*args: Any, **kwargs: Any) -> bool:
    """Return whether these arguments of `Accelerator.prepare_model` (after the model) say that it is only evaluated."""
    return bool(kwargs.get("evaluation_mode", len(args) > 1 and args[1]))


def _warn_of_separate_processes(accelerator: Accelerator, reduction: ReductionStatus) -> None:
    """Warn if more processes were started or asked for than accelerate trains with."""
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started > accelerator.num_processes:
        reduction.notes.append(
            f"{started} processes were started (WORLD_SIZE), but accelerate trains with {accelerator.num_processes}: "
            "each trains alone. Without GPUs, start the script with --use_cpu or use Accelerator(cpu=True)"
        )
    # Accelerate's launcher of single processes sets no WORLD_SIZE, and an address if it was asked for several.
    elif not started and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        reduction.notes.append(
            "accelerate launch was asked for several processes and has started 1, as it does with --cpu; start them "
            "with torchrun --nproc-per-node"
        )
    else:
        return
    logger.warning("hf_lowprec: %s", reduction.notes[-1])


def _any_in_ddp(models: list[nn.Module]) -> bool:
    """Return whether DDP wraps any of `models`. Accelerate keeps the models that it prepares, but no wrappers."""
    wrappers = data_parallel_wrappers() if models else ()  # searching takes a tenth of a second
    return any(getattr(wrapper, "module", None) in models for wrapper in wrappers)


class PreparedModels(weakref.WeakSet):
    """The models of an accelerator whose gradients are already summed in FP32; a plain WeakSet does not pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


def _reduce_sharded_at_load(accelerator: Accelerator, reduction: ReductionStatus, model: nn.Module) -> None:
    """Let gradients be summed in FP32 of a model that transformers has sharded over a device mesh while loading it.

    FSDP2 reduces the gradients of what it has sharded. Those of what tensor and expert parallelism alone have sharded
    are complete on their ranks. The others are summed here.

    Raises:
        ValueError: parallelism is not supported.
        RuntimeError: the ranks' models or settings differ.
    """
    sizes: Any = model.config.distributed_config  # type: ignore[union-attr]
    check_sizes(sizes)
    _compare_models(accelerator, reduction, model)
    for module, group, forward in private_apis.partial_gradients(model):
        partial = PartialGradients(module, group)
        partial.watch()
        module.forward = functools.partial(_watching, partial, forward)
    if reduction.grad_accumulation != "nearest":  # of what FSDP2 has not sharded
        reduction.accumulators.append(GradientAccumulator(model))
    if sizes.dp_size > 1:
        dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
        in_fp32 = sizes.dp_replicate_size > 1 or torch.float16 in dtypes or reduction.grad_accumulation == "fp32"
        set_policy(model, MixedPrecisionPolicy(reduce_dtype=torch.float32 if in_fp32 else None))
        scratch = reduce_scatter_in_fp32(model)
        reshard_after_evaluation(model)
        wrapper = "HSDP" if sizes.dp_replicate_size > 1 else "FSDP2"
        reduction.models.append(ReducedModel(wrapper, sizes.dp_size, scratch))
    if private_apis.trains_on_several_ranks(accelerator.num_processes, [model]):
        average_gradients(
            private_apis.replicated_parameters(model),
            functools.partial(getattr, accelerator.gradient_state, "sync_gradients"),
        )
    if sizes.tp_size > 1:
        reduction.notes.append(
            f"tensor parallelism sums activations and their gradients over {sizes.tp_size} ranks in 16 bits, by torch"
        )


def _watching(partial: PartialGradients, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a module with partial gradients, whose parameters FSDP2 may have gathered for the first time."""
    if torch.is_grad_enabled():
        partial.watch()
    return forward(*args, **kwargs)


def _compare_models(accelerator: Accelerator, reduction: ReductionStatus, model: nn.Module) -> None:
    """Compare the ranks' models before they are wrapped; if they differ, their collectives would wait forever.

    Raises:
        RuntimeError: the ranks' models or settings differ.
    """
    if private_apis.trains_on_several_ranks(accelerator.num_processes, [model]):
        settings = {name: getattr(reduction, name) for name in ("grad_accumulation", "reduction")}
        check_same_settings({**settings, **model_settings(model)})


def _warn_of_different_weights(accelerator: Accelerator, model: nn.Module) -> None:
    """Warn if the ranks' weights differ before sharding.

    FSDP2 keeps each rank's own shard, unlike DDP, which broadcasts rank 0's weights.
    """
    if accelerator.num_processes == 1 or any(gather_objects(any(param.is_meta for param in model.parameters()))):
        return  # weights of a model on the meta device are loaded after sharding
    ignored = private_apis.ignored_by_fsdp2(accelerator, model)
    difference = find_replica_difference(
        (name, param) for name, param in synchronized_parameters(model) if param not in ignored
    )
    if difference is not None and accelerator.is_main_process:
        logger.warning(
            "hf_lowprec: before sharding, %s: FSDP2 would train a mixture of the ranks' weights. Set the same seed on "
            "all ranks before building the model, load the same checkpoint, or set cpu_ram_efficient_loading to start "
            "from rank 0's",
            difference,
        )


def _return_float32_if_cast(model: nn.Module) -> None:
    """Make a cast model return FP32, as it would under mixed precision; called before the model is wrapped."""
    if cast_dtypes(model):
        return_float32(model, next_to_loss=not returns_float32(compiled_module(model)))


def _describe_saved_state(accelerator: Accelerator, models: list[nn.Module], weights: Any, folder: str) -> None:
    """Add to a folder what exporting it needs."""
    if models and accelerator.is_main_process:
        write_parameter_names(Path(folder), models[0], private_apis.prepared_optimizers(accelerator))
        write_model_description(Path(folder), models[0])


def _forbid_later_cast(model: nn.Module) -> None:
    """Make `cast_model` refuse a prepared model that is not cast: it would miss what `prepare` does for cast models."""
    if not cast_dtypes(model) and any(param.requires_grad for param in model.parameters()):
        PREPARED_UNCAST.add(model)


def _check_accumulated(reduction: ReductionStatus, *_: Any) -> None:
    """A step pre-hook.

    Raises:
        RuntimeError: gradients were not accumulated as was asked for.
    """
    if not all(accumulator.was_active for accumulator in reduction.accumulators):
        raise RuntimeError(
            f"grad_accumulation={reduction.grad_accumulation!r} acts in accelerator.backward(loss), which was not "
            "called before this step; call it in place of loss.backward()"
        )


class _Prepared(Accelerator):
    """A prepared accelerator. It has a class of its own, so no other accelerator changes; see `_prepared_class`."""

    _hf_lowprec: tuple[ReductionStatus, FirstStepComparison, PreparedModels]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, type(self)._made_from, vars(self)


def _unpickled(*bases: type) -> Any:
    return object.__new__(_prepared_class(*bases))


def _prepared_class(cls: type, before: type, behind: type) -> Any:
    """A class of accelerators that calls the methods of `before` first.

    It calls those of `behind` in place of accelerate's own, also where a method of a user's class `cls` calls
    `super()`.
    """
    bases = (before, behind) if cls is Accelerator else (before, cls, behind)
    return type(cls)(cls.__name__, bases, {"__module__": cls.__module__, "_made_from": (cls, before, behind)})


class _BeforeOverrides(Accelerator):
    """Methods that call those of a user's class, and change what they get or return."""

    @functools.wraps(Accelerator.prepare)
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare`, which is where FSDP2 shards a model.

        Raises:
            ValueError: the model cannot be sharded in groups of one dtype, or tensor parallelism is accelerate's own.
            RuntimeError: the ranks' models or settings differ.
        """
        reduction, _, prepared_models = self._hf_lowprec
        model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
        if model is not None:
            check_sharded_at_load(self, model)
        if not self.is_fsdp2 or model is None or model in prepared_models:
            return super().prepare(*args, **kwargs)
        _return_float32_if_cast(model)
        _compare_models(self, reduction, model)
        if not self.state.fsdp_plugin.cpu_ram_efficient_loading:  # with it, only rank 0 has weights yet
            _warn_of_different_weights(self, model)
        low_precision = {param.dtype for param in model.parameters() if param.requires_grad} - {torch.float32}
        replicated = bool(self.parallelism_config and self.parallelism_config.dp_replicate_enabled)
        if replicated or torch.float16 in low_precision or reduction.grad_accumulation == "fp32":
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients are reduced, and added up, in FP32
            self.state.fsdp_plugin.mixed_precision_policy = policy

        in_fp32 = fp32_modules(model)  # raises before accelerate takes the parameters from the optimizer

        def shard_fp32_modules(options: dict[str, Any]) -> set[nn.Module]:
            shard_together(in_fp32.values(), **options)
            return {child for module in in_fp32.values() for child in module.modules()}

        low_bits = take_low_bits(model)
        is_sharded = private_apis.is_sharded_model(model)
        grouping = nullcontext() if is_sharded else private_apis.before_fully_shard(shard_fp32_modules)
        with returned_on_error(model, low_bits), grouping:
            prepared = super().prepare(*args, **kwargs)
        reduction.fp32_modules.extend(in_fp32)
        for optimizer in private_apis.prepared_optimizers(self):
            if collector := collector_of(optimizer):
                collector.watch_parameters()  # accelerate has given it the shards
        sharded = private_apis.prepared_models(self)[-1]
        give_low_bits(sharded, low_bits, self.device)
        scratch = reduce_scatter_in_fp32(sharded, reduction.reduction)
        _forbid_later_cast(model)
        prepared_models.add(model)
        reduction.models.append(ReducedModel("HSDP" if replicated else "FSDP2", self.num_processes, scratch))
        return prepared

    @functools.wraps(Accelerator.prepare_model)
    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_model`, which is where DDP wraps a model.

        Raises:
            RuntimeError: the ranks' models or settings differ.
        """
        reduction, _, prepared_models = self._hf_lowprec
        if model in prepared_models:
            return super().prepare_model(model, *args, **kwargs)
        _return_float32_if_cast(model)
        if private_apis.is_sharded_at_load(model):
            _reduce_sharded_at_load(self, reduction, model)
            # It is neither wrapped nor sharded again.
            prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
            prepared_models.update((model, prepared))
            return prepared
        if is_evaluation(*args, **kwargs):
            with private_apis.prepared_again_later(model):
                return super().prepare_model(model, *args, **kwargs)
        _compare_models(self, reduction, model)
        accumulator = None
        if reduction.grad_accumulation != "nearest":
            accumulator = GradientAccumulator(model)
            reduction.accumulators.append(accumulator)
        wrapped = {id(module) for module in model.modules()}
        low_bits = take_low_bits(model) if self.num_processes > 1 else {}
        with returned_on_error(model, low_bits):
            prepared = super().prepare_model(model, *args, **kwargs)
        if self.num_processes > 1:
            give_low_bits(prepared, low_bits, self.device)
        for module in prepared.modules():
            if isinstance(module, DistributedDataParallel) and id(module) not in wrapped:
                averager = reduce_in_fp32(module)
                averager.on_last_bucket = None if accumulator is None else accumulator.restart
                reduction.models.append(ReducedModel("DDP", self.num_processes, averager.scratch))
        _forbid_later_cast(model)
        prepared_models.update((model, prepared))
        return prepared

    @functools.wraps(Accelerator.prepare_optimizer)
    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_optimizer`: compare the ranks before the first step.

        Raises:
            ValueError: the optimizer takes gradients that the accelerator would accumulate.
        """
        reduction, comparison, _ = self._hf_lowprec
        collector = collector_of(unwrap_optimizer(optimizer))
        if collector and any(map(private_apis.is_sharded_at_load, private_apis.prepared_models(self))):
            raise ValueError(
                f"{collector.argument} takes gradients in every backward pass, before those of a model sharded at load "
                "(DistributedConfig) are complete; remove it"
            )
        steps = self.gradient_accumulation_steps
        if collector and not collector.accumulates and steps > 1:
            raise ValueError(
                "gradient_release=True steps in every backward pass, so Accelerator(gradient_accumulation_steps="
                f"{steps}) cannot accumulate gradients; set it to 1 and use larger batches, or remove gradient_release"
            )
        if collector and reduction.grad_accumulation != "nearest":
            raise ValueError(
                f"grad_accumulation={reduction.grad_accumulation!r} adds to gradients in param.grad, which "
                f"{collector.argument} frees in every backward pass; remove one of the two"
            )
        if reduction.grad_accumulation != "nearest":
            unwrap_optimizer(optimizer).register_step_pre_hook(functools.partial(_check_accumulated, reduction))
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        comparison.watch(unwrap_optimizer(prepared), private_apis.prepared_models(self))
        return prepared

    @functools.wraps(Accelerator.backward)
    def backward(self, loss: Any, **kwargs: Any) -> Any:
        """`Accelerator.backward`: warn of a 16-bit loss; accumulate the gradients of all that is trainable by now."""
        warn_if_in_16_bits(loss, "the training step", "compute it of FP32 predictions: predictions.float()")
        reduction, comparison, prepared_models = self._hf_lowprec
        comparison.compare_models([one for one in private_apis.prepared_models(self) if one in prepared_models])
        with ExitStack() as stack:
            for accumulator in reduction.accumulators:
                stack.enter_context(accumulator.active())
            return super().backward(loss, **kwargs)

    @functools.wraps(Accelerator.save_state)
    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.save_state`: describe the saved state in its folder, whose name a hook gets."""
        hook = self.register_save_state_pre_hook(functools.partial(_describe_saved_state, self))
        try:
            return super().save_state(*args, **kwargs)
        finally:
            hook.remove()


class _BehindOverrides(_Prepared):
    """Methods in place of accelerate's own."""

    @functools.wraps(Accelerator.no_sync)
    def no_sync(self, model: nn.Module) -> Any:
        """`Accelerator.no_sync`; with a single process, accelerate's own makes DDP synchronize every micro-batch."""
        if self.num_processes == 1 and isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model)

    @functools.wraps(Accelerator.clip_grad_norm_)
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """`Accelerator.clip_grad_norm_`: clip all parameters of one of our optimizers inside its next step.

        Accelerate's own method runs for a subset of the parameters, for other norms and optimizers, and before the last
        micro-batch.

        Returns None where gradient release has freed gradients and only their norm is asked for, as by Trainer with
        `max_grad_norm=0`; Trainer then logs none.
        """
        _, comparison, _ = self._hf_lowprec
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, parameters))
        ids_with_grad = {id(param) for param in parameters if param.grad is not None}
        for optimizer in private_apis.prepared_optimizers(self):
            stepped = [param for group in optimizer.param_groups for param in group["params"]]
            if (collector := collector_of(optimizer)) and not ids.isdisjoint(map(id, stepped)):
                if collector.accumulates and not self.sync_gradients:
                    raise RuntimeError(
                        f"clip_grad_norm_ before the last micro-batch: {collector.argument} clips in the step; call it "
                        "only if accelerator.sync_gradients"
                    )
                comparison.compare(optimizer, max_norm)
                is_unknown = gradient_release_of(optimizer) and max_norm == math.inf and optimizer.clip == "exact"
                return None if is_unknown else optimizer.clip_grad_norm_(max_norm)
            if ids_with_grad == {id(param) for param in stepped if param.grad is not None}:
                comparison.compare(optimizer, max_norm)  # the norm of shards is a collective, as this is
                # Before the last micro-batch, the gradients must be clipped at once: more will be added to them.
                if isinstance(optimizer, LowPrecisionOptimizer) and norm_type == 2 and self.sync_gradients:
                    return optimizer.clip_grad_norm_(max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)


class _UnderDeepSpeed(Accelerator):
    """DeepSpeed sums gradients and clips."""

    @functools.wraps(Accelerator.prepare)
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare`, which calls `deepspeed.initialize`: give it an optimizer that steps partitions."""
        import deepspeed

        from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed

        reduction, *_ = self._hf_lowprec

        def initialize(original: Callable, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(kwargs.get("optimizer"), LowPrecisionOptimizer):
                return original(*args, **kwargs)
            engine, *others = initialize_deepspeed(config=kwargs.pop("config_params"), **kwargs)
            name = f"ZeRO {engine.zero_optimization_stage()}"
            reduction.models.append(ReducedModel(name, engine.dp_world_size, ScratchBuffers()))
            reduction.notes.append(f"{name}: {_PARTITIONED[engine.zero_optimization_stage()]} on each rank")
            return engine, *others

        with temporarily_wrapped(deepspeed, "initialize", initialize):
            return super().prepare(*args, **kwargs)
