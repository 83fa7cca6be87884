"""`initialize_deepspeed`: DeepSpeed's engine around one of our optimizers, also for `accelerator.prepare`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from hf_lowprec.casting import return_float32
from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.integrations.carry_low_bits import taken_low_bits
from hf_lowprec.integrations.checkpoint_files.stored_tensors import read_zero_states
from hf_lowprec.integrations.deepspeed.config import check_config, set_bf16_flags
from hf_lowprec.integrations.deepspeed.partitioned_optimizer import PartitionedOptimizer
from hf_lowprec.integrations.deepspeed.private_apis import data_parallel_group, keeping_dtypes, shares_experts
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.reduction.collectives import ScratchBuffers
from hf_lowprec.reduction.compare_ranks import check_same_settings, model_settings, optimizer_settings, to_plain_value
from hf_lowprec.reduction.reduction_status import ReducedModel, ReductionStatus
from hf_lowprec.rounding import dtype_name
from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method

_ON_EVERY_RANK = ("gradient_accumulation_steps", "gradient_clipping", "zero_optimization", "data_types")
"""Keys of DeepSpeed's configuration that all ranks must have in common."""
_PARTITIONED = {
    1: "all weights and gradients, and part of the states,",
    2: "all weights, and part of the gradients and states,",
    3: "part of the weights, gradients and states",
}
"""The tensors that each rank holds, by the stage of DeepSpeed's ZeRO."""


def initialize_deepspeed(
    model: nn.Module, optimizer: LowPrecisionOptimizer, config: Mapping[str, Any] | str | Path, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` with an optimizer of hf_lowprec, which works under ZeRO 1, 2 and 3.

    - Given equal gradients, weights and states match a single-process run bit for bit, because every element keeps its
      random bits. 8-bit states become BF16 where a partition cuts their block.
    - Gradients are sent in BF16 and summed in FP32, in rank order, and the mean is rounded once.
    - `gradient_clipping` is applied inside the step, by an FP32 norm, and does not round gradients.
    - Checkpoints of the engine hold FP32 weights: `zero_to_fp32.py` gives all bits. They resume bit for bit with the
      same number of ranks.
    - ZeRO 1 and 2 step the model's weights themselves, so the copy that DeepSpeed makes of them is freed.
    - Norms stay in FP32, though DeepSpeed sends their gradients in BF16.

    Args:
        model: a model without DDP or FSDP, cast with `cast_model`.
        optimizer: an optimizer of the model's parameters that has no states yet.
        config: DeepSpeed's configuration, as a dictionary or a file. The flags in `bf16` and
            `zero_allow_untested_optimizer` are set by this function. A dictionary is changed in place.
        kwargs: further arguments of `deepspeed.initialize`.

    Returns:
        What `deepspeed.initialize` returns: engine, ZeRO optimizer, data loader and scheduler.

    Raises:
        RuntimeError: the ranks' models or settings differ.
        ValueError: `config` selects an unsupported feature, such as offload; or `model` has parameters of unsupported
            dtypes; or `optimizer` computes means over whole tensors or releases gradients.
    """
    if not isinstance(config, dict):
        config = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    check_config(config)
    _check_dtypes(model)
    partitioned = PartitionedOptimizer(optimizer, model)
    deepspeed.init_distributed(**{key: kwargs[key] for key in ("distributed_port",) if key in kwargs})
    of_deepspeed = {f"{key} of DeepSpeed's configuration": to_plain_value(config.get(key)) for key in _ON_EVERY_RANK}
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    of_optimizer = {"max_grad_norm": optimizer.max_grad_norm, **optimizer_settings(optimizer, names)}
    check_same_settings({**model_settings(model), **of_optimizer, **of_deepspeed})
    set_bf16_flags(config)
    if cast_dtypes(model):
        return_float32(model)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    with taken_low_bits(model) as low_bits, keeping_dtypes():
        engine, zero, loader, scheduler = deepspeed.initialize(
            model=model, optimizer=partitioned, config=config, **kwargs
        )
    if shares_experts(zero):
        raise ValueError(
            "deepspeed.moe.layer.MoE partitions its experts differently; use the experts of transformers' models"
        )
    partitioned.partition(zero)
    partitioned.give_low_bits(low_bits, shapes)
    wrap_method(engine, "load_checkpoint", _load_checkpoint)
    return engine, zero, loader, scheduler


def _load_checkpoint(original: Callable, engine: Any, load_dir: str, tag: str | None = None, **kwargs: Any) -> Any:
    """`engine.load_checkpoint`, which by itself loads weights before it finds that the states do not fit.

    Raises:
        ValueError: see `read_zero_states`; or another stage or number of ranks saved the checkpoint. Nothing is loaded.
    """
    if tag is None and not Path(load_dir, "latest").is_file():
        return original(engine, load_dir, tag, **kwargs)  # which loads nothing, and says so
    folder, *saved = read_zero_states(Path(load_dir), tag)
    ranks, stage = data_parallel_group(engine.optimizer).size(), engine.zero_optimization_stage()
    states = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
    if states and (saved[0], saved[1] == 3) != (ranks, stage == 3):  # ZeRO 1 and 2 hold the same
        raise ValueError(
            f"{str(folder)!r} was saved by {saved[0]} ranks under ZeRO {saved[1]}, and this run has {ranks} under ZeRO "
            f"{stage}. Resume with the former, or write the FP32 weights with hf-lowprec export and start from them"
        )
    if stage == 3 and tag and not states:  # DeepSpeed reads FP32 weights, from the folder that `latest` names
        read_zero_states(Path(load_dir))
    return original(engine, load_dir, tag, **kwargs)


def _check_dtypes(model: nn.Module) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if torch.bfloat16 not in dtypes or not dtypes <= {torch.bfloat16, torch.float32}:
        found = ", ".join(sorted(map(dtype_name, dtypes))) or "none"
        raise ValueError(
            f"the dtypes of the trainable parameters are {found}; call cast_model(model) before initialize_deepspeed"
        )


def set_up_deepspeed(accelerator: Any, status: ReductionStatus) -> None:
    """Set what our optimizers need in an `Accelerator`'s configuration, and make `prepare` accept them."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if changed := set_bf16_flags(config):
        status.notes.append(f"set in DeepSpeed's configuration: {', '.join(changed)}")
    if status.grad_accumulation == "fp32":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    wrap_method(accelerator, "prepare", functools.partial(_prepare, status))


def _prepare(status: ReductionStatus, original: Callable, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare`, which calls `deepspeed.initialize`: give it an optimizer that steps partitions."""

    def initialize(original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("optimizer"), LowPrecisionOptimizer):
            return original(*args, **kwargs)
        engine, *others = initialize_deepspeed(config=kwargs.pop("config_params"), **kwargs)
        stage = engine.zero_optimization_stage()
        status.models.append(ReducedModel(f"ZeRO {stage}", engine.dp_world_size, ScratchBuffers()))
        status.notes.append(f"ZeRO {stage}: {_PARTITIONED[stage]} on each rank")
        return engine, *others

    with temporarily_wrapped(deepspeed, "initialize", initialize):
        return original(accelerator, *args, **kwargs)
