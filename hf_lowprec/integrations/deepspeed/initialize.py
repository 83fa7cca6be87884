"""`initialize_deepspeed`: DeepSpeed's engine around one of our optimizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from hf_lowprec.casting import return_float32
from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.integrations.accelerate.carry_low_bits import returned_on_error, take_low_bits
from hf_lowprec.integrations.deepspeed.partitioned_optimizer import PartitionedOptimizer
from hf_lowprec.optim import LowPrecisionOptimizer

BF16_FLAGS = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
"""With these, DeepSpeed gives an optimizer its partition in BF16; without the last two, an FP32 copy of it."""


def initialize_deepspeed(
    model: nn.Module, optimizer: LowPrecisionOptimizer, config: Mapping[str, Any] | str | Path, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, with an optimizer of hf_lowprec that keeps its promises under ZeRO 1, 2 and 3.

    - The weights, gradients and states are those of one process, bit for bit, given equal gradients: every element
      keeps its random bits and its block of a state in 8 bits.
    - Gradients are sent in BF16 and summed in FP32, in rank order, and the mean is rounded once.
    - `gradient_clipping` is applied inside the step, by an FP32 norm, and does not round gradients.
    - Checkpoints of the engine hold FP32 weights: `zero_to_fp32.py` gives all bits. They resume bit for bit with the
      same number of ranks.
    - ZeRO 1 and 2 step the model's weights themselves, so the copy that DeepSpeed makes of them is freed.

    All parameters are BF16, norms included: DeepSpeed has one dtype for all.

    Args:
        model: a model without DDP or FSDP, cast with `cast_model(model, one_dtype=True)`.
        optimizer: an optimizer of its parameters, without states.
        config: DeepSpeed's configuration, as a dictionary or a file. The flags in `bf16` and
            `zero_allow_untested_optimizer` are set, in a dictionary as well.
        kwargs: further arguments of `deepspeed.initialize`.

    Returns:
        What `deepspeed.initialize` returns: engine, ZeRO optimizer, data loader and scheduler.

    Raises:
        ValueError: `config` selects what is not supported, such as offload; or `model` has parameters of several
            dtypes; or `optimizer` needs whole tensors or releases gradients.
    """
    if not isinstance(config, dict):
        config = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    set_bf16_flags(config)
    check_config(config)
    _check_dtypes(model)
    if cast_dtypes(model):
        return_float32(model)
    partitioned = PartitionedOptimizer(optimizer)
    low_bits = take_low_bits(model)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    with returned_on_error(model, low_bits):
        engine, zero, loader, scheduler = deepspeed.initialize(
            model=model, optimizer=partitioned, config=config, **kwargs
        )
    partitioned.partition(zero)
    partitioned.give_low_bits(model, low_bits, shapes)
    return engine, zero, loader, scheduler


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
                f"zero_optimization.{key}.device={device!r} needs DeepSpeedCPUAdam, which keeps FP32 masters; remove it. "
                "To save memory, use stage 3, rounding='stochastic' or state_dtype=int8, or FSDP2 with CPU offload"
            )
    unsupported = {
        "zero_optimization.elastic_checkpoint": (
            zero.get("elastic_checkpoint"),
            "pads states as FP32 numbers, which damages remainders",
        ),
        "zero_optimization.zenflow": (zero.get("zenflow"), "steps parameters on the CPU"),
        "zero_optimization.zero_quantized_gradients": (
            zero.get("zero_quantized_gradients"),
            "sends gradients in 4 bits",
        ),
        "zero_optimization.mics_shard_size": (zero.get("mics_shard_size", -1) > 0, "partitions in another way"),
        "fp16.enabled": ((config.get("fp16") or {}).get("enabled") is True, "excludes BF16"),
        "torch_autocast.enabled": ((config.get("torch_autocast") or {}).get("enabled"), "excludes a BF16 model"),
        "tensor_parallel.autotp_size": (
            (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1,
            "shards parameters in another way; use tensor parallelism with FSDP2",
        ),
        "checkpoint.load_universal": (
            (config.get("checkpoint") or {}).get("load_universal"),
            "reads states of one flat tensor per group",
        ),
        "optimizer": (config.get("optimizer"), "replaces the optimizer that you pass"),
    }
    for key, (value, effect) in unsupported.items():
        if value:
            raise ValueError(f"{key}={value!r} in DeepSpeed's configuration {effect}; remove it")


def _check_dtypes(model: nn.Module) -> None:
    kept = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.is_floating_point() and param.dtype != torch.bfloat16
    ]
    if kept:
        raise ValueError(
            f"{len(kept)} trainable parameters are not BF16 ({kept[0]}, …), but DeepSpeed has one dtype for all. Call "
            "cast_model(model, one_dtype=True) before deepspeed.zero.Init or initialize_deepspeed; with Trainer and "
            "ZeRO 3, set bf16=True before the model is loaded"
        )
