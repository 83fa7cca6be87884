"""Accelerator setups that are unsupported because gradients would not be summed in FP32."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedType

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load

_SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.FSDP,
}
_SETTINGS = {
    DistributedType.DEEPSPEED: "TrainingArguments(deepspeed=…), DeepSpeedPlugin and --use_deepspeed",
    DistributedType.MEGATRON_LM: "MegatronLMPlugin and --use_megatron_lm",
}
"""The settings that select a type, if they have other names than the type."""
_KAHAN_UNDER_FSDP2 = (
    "grad_accumulation='kahan' is not supported with FSDP2, which accumulates micro-batches itself; use 'fp32' or "
    "'nearest'"
)
_ALTERNATIVE = "use DDP (accelerate launch --multi_gpu) or FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"


def check_supported(accelerator: Any, grad_accumulation: str) -> None:
    """Check the setup of `accelerator` for `grad_accumulation`.

    Raises:
        ValueError: the setup is not supported; the message names the setting and what to change.
    """
    kind = accelerator.distributed_type
    if kind not in _SUPPORTED:
        setting = _SETTINGS.get(kind, f"distributed_type={kind.value}")
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
    _check_parallelism(accelerator.parallelism_config)
    if kind == DistributedType.FSDP:
        _check_fsdp(accelerator, grad_accumulation)


def _check_parallelism(config: Any) -> None:
    for size, name in (("cp_size", "context"), ("sp_size", "sequence")):
        if config is not None and getattr(config, size, 1) > 1:
            raise ValueError(
                f"ParallelismConfig({size}={getattr(config, size)}): {name} parallelism is not supported with FP32 "
                f"sums; use dp_shard_size and dp_replicate_size, with {size}=1"
            )


def check_sharded_at_load(accelerator: Any, model: Any) -> None:
    """Check that a model which is prepared for tensor parallelism was sharded by transformers when it was loaded.

    Raises:
        ValueError: it was not; accelerate would have to shard it.
    """
    size = getattr(accelerator.parallelism_config, "tp_size", 1)
    if size > 1 and not is_sharded_at_load(model):
        raise ValueError(
            f"ParallelismConfig(tp_size={size}): accelerate cannot shard this model (its _prepare_tp needs a name that "
            "transformers 5 no longer has); load it with from_pretrained(…, "
            f"distributed_config=transformers.DistributedConfig(tp_size={size}))"
        )


def check_sizes(sizes: Any, grad_accumulation: str) -> None:
    """Check the `DistributedConfig` of a model that transformers has sharded while loading it.

    Raises:
        ValueError: it is not supported.
    """
    if sizes.pp_size > 1:
        raise ValueError(
            f"DistributedConfig(pp_size={sizes.pp_size}): pipeline parallelism is not supported; use fsdp_size, "
            "tp_size and ep_size"
        )
    if sizes.dp_size > 1 and grad_accumulation == "kahan":
        raise ValueError(_KAHAN_UNDER_FSDP2)


def _check_fsdp(accelerator: Any, grad_accumulation: str) -> None:
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
    if grad_accumulation == "kahan":
        raise ValueError(_KAHAN_UNDER_FSDP2)
