"""Setups of accelerators, models and optimizers with which gradients would not be summed in FP32, or as requested."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting.earlier_casts import runs_under_autocast
from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load, prepared_models
from hf_lowprec.integrations.collect_after_reduction import data_parallel_wrappers
from hf_lowprec.integrations.deepspeed.config import check_config
from hf_lowprec.optim.gradients.collector import GradientCollector
from hf_lowprec.reduction.fsdp2 import check_nccl

_SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
}
_ALTERNATIVE = "use DDP (accelerate launch --multi_gpu) or FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"


def check_setup(accelerator: Any, grad_accumulation: str, reduction: str) -> None:
    """Check that gradients will be summed in FP32 with this setup of an accelerator.

    Raises:
        ValueError: the setup is not supported; the message names the setting and what to change.
    """
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED:
        megatron = kind == DistributedType.MEGATRON_LM
        setting = "MegatronLMPlugin and --use_megatron_lm" if megatron else f"distributed_type={kind.value}"
        raise ValueError(
            f"distributed_type={kind.value} reduces gradients itself, in 16 bits, and offers no hook for FP32 sums; "
            f"remove {setting} and {_ALTERNATIVE}"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={accelerator.mixed_precision!r} is incompatible with pure BF16 training, which replaces "
            "autocast and loss scaling; use mixed_precision='no'"
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={str(getattr(handler.comm_hook, 'value', handler.comm_hook))!r}) "
            "would replace the hook for FP32 sums; remove it"
        )
    if grad_accumulation != "nearest" and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise ValueError(
            f"GradientAccumulationPlugin(sync_each_batch=True) rounds gradients after every micro-batch, which "
            f"grad_accumulation={grad_accumulation!r} is meant to prevent; remove one of the two"
        )
    if kind == DistributedType.DEEPSPEED:
        _check_deepspeed(accelerator, grad_accumulation)
    else:
        _check_parallelism(accelerator.parallelism_config, kind)
    if kind == DistributedType.FSDP:
        _check_fsdp(accelerator)
    if reduction == "nccl":
        _check_reduction_by_nccl(accelerator, grad_accumulation)


def _check_deepspeed(accelerator: Any, grad_accumulation: str) -> None:
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    check_config(config | ({"data_types": {"grad_accum_dtype": "fp32"}} if grad_accumulation == "fp32" else {}))


def _check_parallelism(config: Any, kind: DistributedType) -> None:
    if getattr(config, "sp_size", 1) > 1:  # DeepSpeed's: without it, accelerate ignores it
        raise ValueError(
            f"ParallelismConfig(sp_size={config.sp_size}): sequence parallelism is not supported without DeepSpeed; "
            "use dp_shard_size, dp_replicate_size and cp_size, with sp_size=1"
        )
    if getattr(config, "cp_size", 1) > 1 and kind != DistributedType.FSDP:
        raise ValueError(
            f"ParallelismConfig(cp_size={config.cp_size}): FP32 sums over the ranks of a context need FSDP2 "
            "(accelerate launch --use_fsdp --fsdp_version 2)"
        )


def check_sharded_at_load(accelerator: Any, model: Any) -> None:
    """Check that a model which is prepared for tensor parallelism was sharded by transformers when it was loaded.

    Raises:
        ValueError: it was not; accelerate would have to shard it.
    """
    config = accelerator.parallelism_config
    if config is not None and config.tp_size > 1 and not is_sharded_at_load(model):
        raise ValueError(
            f"ParallelismConfig(tp_size={config.tp_size}): accelerate cannot shard this model (its _prepare_tp needs "
            "a name that transformers 5 no longer has); load it with from_pretrained(…, "
            f"distributed_config=transformers.DistributedConfig(tp_size={config.tp_size}))"
        )


def check_sizes(sizes: Any) -> None:
    """Check the `DistributedConfig` of a model that transformers has sharded while loading it.

    Raises:
        ValueError: it is not supported.
    """
    if sizes.pp_size > 1:
        raise ValueError(
            f"DistributedConfig(pp_size={sizes.pp_size}): pipeline parallelism is not supported; use fsdp_size, "
            "tp_size and ep_size"
        )


def _check_fsdp(accelerator: Any) -> None:
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            "FSDP1 has no hook for FP32 sums; set fsdp_version: 2 in the accelerate configuration, "
            'accelerate launch --fsdp_version 2, or TrainingArguments(fsdp_config={"version": 2})'
        )
    if plugin.mixed_precision_policy is not None and accelerator.mixed_precision == "no":
        raise ValueError(
            "FullyShardedDataParallelPlugin(mixed_precision_policy=…) would cast parameters or gradients again; "
            "remove it"
        )


def _check_reduction_by_nccl(accelerator: Any, grad_accumulation: str) -> None:
    kind, config = accelerator.distributed_type, accelerator.parallelism_config
    if kind != DistributedType.FSDP:
        raise ValueError(
            f"reduction='nccl' needs FSDP2, but distributed_type={kind.value}; use FSDP2 (accelerate launch "
            "--use_fsdp --fsdp_version 2) or reduction='rank_order'"
        )
    replicated = config is not None and config.dp_replicate_enabled
    if replicated or grad_accumulation == "fp32":
        obstacle = "dp_replicate_size > 1 (HSDP)" if replicated else "grad_accumulation='fp32'"
        raise ValueError(
            f"reduction='nccl' is impossible with {obstacle}, for which FSDP2 sends gradients in FP32; use "
            "reduction='rank_order', which sends 16 bits"
        )
    check_nccl(accelerator.device.type)


def check_prepared_models(models: list[nn.Module], grad_accumulation: str) -> None:
    """Raise ValueError if one of `models`, which an accelerator has prepared, can no longer be changed as needed."""
    # Accelerate keeps the models that it prepares, but no wrappers. Searching for these takes a tenth of a second.
    wrapped = [getattr(wrapper, "module", None) for wrapper in data_parallel_wrappers()] if models else []
    if any(isinstance(model, DistributedDataParallel | FSDPModule) or model in wrapped for model in models):
        reason = "a model was already prepared"
    elif any(map(runs_under_autocast, models)):
        reason = "a model was already prepared with mixed precision, so it runs under autocast"
    elif grad_accumulation != "nearest" and any(p.requires_grad for model in models for p in model.parameters()):
        reason = f"a model was already prepared without grad_accumulation={grad_accumulation!r}"
    else:
        return
    raise ValueError(f"{reason}; call prepare_accelerator before accelerator.prepare")


def check_optimizer(accelerator: Any, collector: GradientCollector | None, grad_accumulation: str) -> None:
    """Raise ValueError if an optimizer takes gradients that `accelerator` would accumulate.

    Args:
        accelerator: the accelerator that will prepare the optimizer.
        collector: what takes gradients for the optimizer; None if nothing does.
        grad_accumulation: as `prepare_accelerator` takes it.
    """
    if collector is None:
        return
    if any(map(is_sharded_at_load, prepared_models(accelerator))):
        raise ValueError(
            f"{collector.argument} takes gradients during the backward pass, when a model sharded at load "
            "(DistributedConfig) has not completed them; remove it"
        )
    steps = accelerator.gradient_accumulation_steps
    if not collector.accumulates and steps > 1:
        raise ValueError(
            "gradient_release=True steps in every backward pass, so Accelerator(gradient_accumulation_steps="
            f"{steps}) cannot accumulate gradients; set it to 1 and use larger batches, or remove gradient_release"
        )
    if grad_accumulation != "nearest":
        raise ValueError(
            f"grad_accumulation={grad_accumulation!r} adds to gradients in param.grad, which "
            f"{collector.argument} frees in every backward pass; remove one of the two"
        )


def describe_separate_processes(accelerator: Any) -> str:
    """Return a message if `accelerator` trains with fewer processes than were started or requested, or nothing."""
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started > accelerator.num_processes:
        return (
            f"{started} processes were started (WORLD_SIZE), but accelerate trains with {accelerator.num_processes}: "
            "each trains alone. Without GPUs, start the script with --use_cpu or use Accelerator(cpu=True)"
        )
    # Accelerate's launcher for a single process sets no WORLD_SIZE, but an address if several were requested.
    if not started and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        return (
            "accelerate launch was asked for several processes and has started 1, as it does with --cpu; start them "
            "with torchrun --nproc-per-node"
        )
    return ""
