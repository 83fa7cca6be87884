"""`hf-lowprec convert-config DS_CONFIG OUT`: an accelerate configuration for FSDP2 in place of DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd"}
"""DeepSpeed's types of optimizers, and our algorithms; its Adam decays weights as AdamW does unless told not to."""
_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's types of schedulers, and those of TrainingArguments."""
_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""Keys of DeepSpeed's configuration, and the arguments of TrainingArguments that have the same values."""
_OFFLOAD = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
_STAGE = "zero_optimization.stage"
_NEEDLESS = ("bf16.", "fp16.", "optimizer.params.adam_w_mode")
"""What needs no setting: the model is BF16."""


def convert_config(
    ds_config: Annotated[Path, typer.Argument(help="DeepSpeed's configuration, a JSON file.")],
    out: Annotated[Path, typer.Argument(help="The YAML file to write.")],
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Number of processes, one for each GPU.")],
) -> None:
    """Write a configuration of accelerate that trains with FSDP2 in the memory of DeepSpeed's ZeRO.

    Stages 1 and 2 keep whole weights on every GPU between forward and backward,
    stage 3 shards them. Offload to the CPU is taken over. What belongs into
    TrainingArguments, and what has no counterpart, is listed.
    """
    from hf_lowprec.integrations.checkpoint_files.json_files import read_json

    try:
        config = read_json(ds_config)
        lines = fsdp2_lines(config, gpus)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if out.exists():
        raise typer.BadParameter(f"{out} exists")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    typer.echo(f"{out}: accelerate launch --config_file {out} train.py")
    for note in notes(config):
        typer.echo(f"  {note}")


def fsdp2_lines(config: dict[str, Any], gpus: int) -> list[str]:
    """The lines of the YAML file.

    Args:
        config: DeepSpeed's configuration.
        gpus: number of processes.

    Raises:
        ValueError: the configuration partitions nothing.
    """
    values = dict(_flat(config))
    if (stage := values.get(_STAGE, 0)) not in (1, 2, 3):
        raise ValueError(f"{_STAGE}={stage!r} partitions nothing; train with DDP, or set 1, 2 or 3")
    options = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": stage == 3,
        "fsdp_offload_params": any(values.get(key, "none") != "none" for key in _OFFLOAD),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    return [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        "num_machines: 1",
        "machine_rank: 0",
        f"num_processes: {gpus}",
        'mixed_precision: "no"',
        "fsdp_config:",
        *(f"  {key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()),
    ]


def notes(config: dict[str, Any]) -> Iterator[str]:
    """What the YAML file does not say, one line each: where it belongs, or that it has no counterpart."""
    values, auto, lost = dict(_flat(config)), [], []
    for key, value in values.items():
        if key == _STAGE or key.startswith(_NEEDLESS) or (value == "auto" and key.startswith("zero_optimization.")):
            continue  # the second are sizes that depend on the model
        if value == "auto":
            auto.append(key)
        elif key in _ARGUMENTS:
            yield f"{key}={value}: in TrainingArguments, {_ARGUMENTS[key]}"
        elif key in _OFFLOAD and value != "none":
            yield f"{key}={value}: FSDP2 offloads weights, gradients and states together, to the CPU's memory"
        elif key == "optimizer.type" and (algorithm := _OPTIMIZERS.get(str(value).lower())):
            decoupled = values.get("optimizer.params.adam_w_mode", True)
            yield f"{key}={value}: --optim {algorithm if decoupled else 'adam'}_bf16_split"
        elif key == "scheduler.type" and value in _SCHEDULERS:
            yield f"{key}={value}: in TrainingArguments, lr_scheduler_type={_SCHEDULERS[value]!r}"
        elif key.startswith("activation_checkpointing."):
            yield f"{key}={value}: in TrainingArguments, gradient_checkpointing=True"
        else:
            lost.append(f"{key}={value}")
    if auto:
        yield f"from TrainingArguments, as before: {', '.join(auto)}"
    if lost:
        yield f"without a counterpart: {', '.join(lost)}"


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects, by keys with dots."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
