"""DeepSpeed's configuration: flags that our optimizers need, and checks for unsupported settings and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradients.collector import collector_of

BF16_FLAGS = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
"""With these, DeepSpeed gives an optimizer its partition in BF16; without the last two, an FP32 copy of it."""


def set_bf16_flags(config: dict[str, Any]) -> list[str]:
    """Set what our optimizers need in DeepSpeed's `config`. Returns the keys that have changed."""
    bf16 = config.setdefault("bf16", {})
    changed = [f"bf16.{name}" for name in BF16_FLAGS if bf16.get(name) is not True]
    bf16 |= dict.fromkeys(BF16_FLAGS, True)
    config["zero_allow_untested_optimizer"] = True
    return changed


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of DeepSpeed's `config` that is not supported; the message says what to change."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage={stage} partitions nothing; set 1, 2 or 3, or use DDP without DeepSpeed"
        )
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", None):
            raise ValueError(
                f"zero_optimization.{key}.device={device!r} needs DeepSpeedCPUAdam, which keeps FP32 masters; remove "
                "it. To save memory, use stage 3, the optimizer's offload_states=True, rounding='stochastic' or "
                "state_dtype=int8, or FSDP2 with CPU offload"
            )
    autotp = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    unsupported = {
        "zero_optimization.elastic_checkpoint": (zero.get("elastic_checkpoint"), "pads states, and damages remainders"),
        "zero_optimization.compute_grad_norm": (zero.get("compute_grad_norm") is False and "false", "skips the norm"),
        "zero_optimization.zenflow": (zero.get("zenflow"), "steps parameters on the CPU"),
        "zero_optimization.zero_quantized_gradients": (zero.get("zero_quantized_gradients"), "sends 4-bit gradients"),
        "zero_optimization.contiguous_gradients": (
            stage < 3 and zero.get("contiguous_gradients") is False and "false",
            "averages gradients in 16 bits",
        ),
        "zero_optimization.mics_shard_size": (max(zero.get("mics_shard_size", -1), 0), "partitions differently"),
        "fp16.enabled": ((config.get("fp16") or {}).get("enabled") is True, "excludes BF16"),
        "torch_autocast.enabled": ((config.get("torch_autocast") or {}).get("enabled"), "excludes a BF16 model"),
        "tensor_parallel.autotp_size": (autotp > 1 and autotp, "shards differently; use tensor parallelism with FSDP2"),
        "checkpoint.load_universal": ((config.get("checkpoint") or {}).get("load_universal"), "reads other states"),
        "data_types.grad_accum_dtype": (
            stage == 1 and (config.get("data_types") or {}).get("grad_accum_dtype") == "fp32" and "fp32",
            "(grad_accumulation='fp32') needs stage 2 or 3, because ZeRO 1 would keep FP32 weights",
        ),
        "optimizer": (config.get("optimizer"), "replaces the optimizer that you pass"),
    }
    for key, (value, effect) in unsupported.items():
        if value:
            raise ValueError(f"{key}={value!r} in DeepSpeed's configuration {effect}; remove it")


def check_optimizer(optimizer: LowPrecisionOptimizer) -> None:
    """Raise ValueError if DeepSpeed cannot step `optimizer`."""
    name = type(optimizer).__name__
    if any(map(optimizer.takes_means, optimizer.param_groups)):
        raise ValueError(
            f"{name} takes means over whole tensors, which DeepSpeed cuts into flat partitions; use AdamW without "
            "factored=True, or train with FSDP2"
        )
    if hasattr(optimizer, "eval"):
        raise ValueError(
            f"{name} changes weights in eval(), but DeepSpeed would not copy them into the model; use AdamW"
        )
    if collector := collector_of(optimizer):
        raise ValueError(
            f"{collector.argument} takes gradients during the backward pass, before DeepSpeed averages them; remove it"
        )
    if optimizer.state:
        raise ValueError(f"this {name} has states already; build a new one, and load states after preparing it")
