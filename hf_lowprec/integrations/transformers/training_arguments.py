"""The optimizer that `TrainingArguments` select, and what cannot be combined with training in 16 bits.

Each message says what to change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainingArguments

from hf_lowprec.casting.quantized import holds_quantized_weights, is_quantized
from hf_lowprec.integrations.adapters import has_adapters
from hf_lowprec.integrations.transformers.optim_args import optim_args_of, optimizer_name
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES, optimizer_factory

if TYPE_CHECKING:  # as in `callback.py`
    from transformers import Trainer

_REPLACED_FIELDS = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Keys of `optim_args` whose value replaces that of a field, which must then have its default or the same value."""
_ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")
_ADAPTERS = "train adapters on it (peft.get_peft_model), or load it without quantization_config"


def optimizer_arguments(args: Any) -> tuple[type[LowPrecisionOptimizer], dict[str, Any]]:
    """Return the optimizer class and keyword arguments for `TrainingArguments` with one of our `optim` names.

    `optim_args` takes precedence over the dedicated fields (`adam_beta1`, …). These take precedence over the class's
    defaults only if they were changed: Adam's default β2 of 0.999 must not become every algorithm's β2. A field without
    a counterpart in the algorithm is ignored, as in Trainer.

    Raises:
        ValueError: `optim_args` has an unknown key or a value that cannot be parsed, or one that differs from that of
            a field in `_REPLACED_FIELDS`; or `adam_beta1` or `adam_beta2` was set for an algorithm with three betas.
            The message names it.
    """
    cls, kwargs = optimizer_factory(optimizer_name(args))
    options = optim_args_of(args).optimizer
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for key, field in _REPLACED_FIELDS.items():
        value = getattr(args, field)
        if value not in (defaults[field], options.get(key, value)):
            raise ValueError(f"{field}={value} and {key}={options[key]} in optim_args differ; remove one of them")
    kwargs |= {"lr": args.learning_rate, "seed": args.seed}
    kwargs |= _adam_fields(args, {key: value for key, value in keywords(cls).items() if key not in options})
    if options.get("clip") == "delayed" and args.max_grad_norm:
        kwargs["max_grad_norm"] = args.max_grad_norm  # known before the backward pass, unlike in other modes
    kwargs |= copy.deepcopy(dict(options))  # a copy, because the parsed options are cached
    if kwargs.get("max_grad_norm") == 0:  # as in Trainer's field, for no clipping
        del kwargs["max_grad_norm"]
    return cls, kwargs


def checked_arguments(args: Any) -> dict[str, Any]:
    """Return the optimizer's keyword arguments, and raise its constructor's errors before any model is changed.

    Raises:
        ValueError: see `optimizer_arguments`; or a value is out of range; or `optim_target_modules` or TRL's
            `cast_lm_head_to_fp32` is set, which these optimizers do not support; or see `check_gradient_release`.
    """
    _, kwargs = optimizer_arguments(args)
    if args.optim_target_modules:
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r} selects modules for GaLore and APOLLO, but "
            f"optim={optimizer_name(args)!r} trains all parameters that require gradients; remove it"
        )
    if getattr(args, "cast_lm_head_to_fp32", False):  # in TRL's configurations; it upcasts an already rounded head
        raise ValueError(
            "cast_lm_head_to_fp32=True acts only after the cast to 16 bits; set optim_args='keep_fp32=lm_head' instead"
        )
    if kwargs.get("gradient_release") is True:
        norm = optim_args_of(args).optimizer.get("max_grad_norm", args.max_grad_norm)
        check_gradient_release(args, norm, str(kwargs.get("clip", "exact")))
    return optimizer_factory(optimizer_name(args), **kwargs)[1]


def copy_to_fields(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Copy the options of `optim_args` that Trainer reads from `args` to `args`.

    Trainer writes its `weight_decay` into the param groups, and its `max_grad_norm` decides whether it clips. By
    default, its DDP looks for unused parameters, so no gradient could be taken during the backward pass.
    """
    for key, field in _REPLACED_FIELDS.items():
        setattr(args, field, options.get(key, getattr(args, field)))
    if "max_grad_norm" in options:
        args.max_grad_norm = options["max_grad_norm"]
    takes_gradients = options.get("gradient_release") or options.get("offload_gradients")
    if takes_gradients and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False


def _adam_fields(args: Any, open_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments from Trainer's changed `adam_…` fields.

    Args:
        args: Trainer's arguments.
        open_defaults: the algorithm's keywords and defaults, without those that `optim_args` sets.
    """
    stock = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    changed = {name: getattr(args, name) for name in _ADAM_FIELDS if getattr(args, name) != stock[name]}
    kwargs = {}
    if "eps" in open_defaults and "adam_epsilon" in changed:
        kwargs["eps"] = changed["adam_epsilon"]
    if "betas" in open_defaults and (changed_betas := changed.keys() & {"adam_beta1", "adam_beta2"}):
        if len(open_defaults["betas"]) != 2:
            as_text = "|".join(map(str, open_defaults["betas"]))
            raise ValueError(
                f"{' and '.join(sorted(changed_betas))} cannot be used with optim={optimizer_name(args)!r}, which has "
                f"{len(open_defaults['betas'])} betas; set optim_args='betas={as_text}'"
            )
        first, second = open_defaults["betas"]
        kwargs["betas"] = (changed.get("adam_beta1", first), changed.get("adam_beta2", second))
    return kwargs


def check_precision(args: Any) -> None:
    """Raise ValueError if the mixed precision or an evaluation dtype is incompatible with a 16-bit model."""
    if args is None:
        return
    if args.fp16 or args.mixed_precision not in ("no", "bf16"):
        setting = "fp16=True" if args.fp16 else f"mixed_precision={args.mixed_precision!r}"
        raise ValueError(
            f"{setting} is incompatible with pure BF16 training, which replaces autocast and loss scaling; remove it"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True would cast the model again, including its FP32 norms; the model is already in 16 bits, "
                "so remove it"
            )


def check_one_gpu(trainer: Trainer) -> None:
    """Raise ValueError for DataParallel. Only a built Trainer knows: it counts one GPU if a model spans several."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"one process with {trainer.args.n_gpu} GPUs (DataParallel) sums gradients in 16 bits; start one process "
            "per GPU with accelerate launch or torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES=0 to use one GPU"
        )


def check_quantized_weights_are_frozen(model: nn.Module) -> None:
    """Check that no trainable weight of `model` is quantized.

    Frozen quantized weights below trainable adapters are fine.

    Raises:
        ValueError: such a weight would be trained; the message says what to do.
    """
    for name, param in model.named_parameters():
        if param.requires_grad and is_quantized(param):
            kind = f"{type(param.data).__name__} of {param.dtype}"
            raise ValueError(f"{name} is quantized ({kind}) and requires a gradient: {_ADAPTERS}")
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if has_adapters(model):
        return
    if getattr(model, "is_quantized", False):
        aware = getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
        what = "quantization-aware training" if aware else "training all weights"
        raise ValueError(
            f"{what} of a model with quantization_config={type(config).__name__} is not supported: {_ADAPTERS}"
        )
    quantized = next((name for name, module in model.named_modules() if holds_quantized_weights(module)), None)
    # With trainable adapters or norms, the rest is frozen.
    if quantized is not None and all(param.requires_grad for param in model.parameters() if not is_quantized(param)):
        raise ValueError(
            f"the whole model is trainable, but its weights are quantized ({quantized}) and would not change: "
            f"{_ADAPTERS}"
        )


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError if `model` has no trainable parameters."""
    if any(param.requires_grad for param in model.parameters()):
        return
    way_out = (
        "to continue training saved adapters, load them with PeftModel.from_pretrained(…, is_trainable=True)"
        if has_adapters(model)
        else "to train all weights, as after merge_and_unload(), call model.requires_grad_(True)"
    )
    raise ValueError(f"no parameter of the model requires a gradient, so nothing would be trained; {way_out}")


def check_built_optimizer(args: TrainingArguments, optimizer: Any) -> None:
    """Raise ValueError if `optim` is one of our names, and another library's optimizer was built."""
    if args.optim in OPTIMIZER_NAMES and not isinstance(optimizer, LowPrecisionOptimizer):
        raise ValueError(
            f"optim={optimizer_name(args)!r} was requested, but {type(optimizer).__name__} from optimizers= or "
            "create_optimizer would round away its updates to 16-bit weights. Build an hf_lowprec optimizer there, "
            "directly or with Trainer.get_optimizer_cls_and_kwargs(args); or set optim='adamw_torch' and "
            "callbacks=[hf_lowprec.LowPrecisionCallback()] to train in BF16 anyway"
        )


def check_gradient_release(args: Any, max_grad_norm: float, clip: str) -> None:
    """Raise ValueError if Trainer's arguments are incompatible with an optimizer with `gradient_release=True`.

    Args:
        args: Trainer's arguments.
        max_grad_norm: the norm to which it clips, 0 for no clipping.
        clip: the optimizer's argument.
    """
    steps = args.gradient_accumulation_steps
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} accumulates gradients, but gradient_release=True steps parameters "
            "and frees their gradients during every backward pass. Set gradient_accumulation_steps=1 and raise "
            "per_device_train_batch_size, with gradient_checkpointing=True if activations do not fit; or replace "
            "gradient_release=True by offload_states=True,offload_gradients=True, which accumulates in host memory"
        )
    if max_grad_norm and clip == "exact":
        mode = optimizer_name(args).partition("_bf16_")[2]
        stable = f"optim='stableadamw_bf16_{mode}'" if mode else "hf_lowprec.StableAdamW"
        raise ValueError(
            f"max_grad_norm={max_grad_norm} (Trainer's default is 1.0) needs the norm of all gradients before the "
            "first parameter is stepped, but gradient_release=True frees gradients during the backward pass. Set "
            f"max_grad_norm=0 ({stable} clips each tensor's update by itself); or "
            "optim_args='gradient_release=True,clip=delayed', which clips by the norm of the step before; or "
            "optim_args='offload_states=True,offload_gradients=True'"
        )


def check_liger(args: Any, heads: Iterable[str]) -> None:
    """Raise ValueError, naming what to change, if `use_liger_kernel` cannot run.

    Args:
        args: Trainer's arguments when training begins.
        heads: the output heads that are kept in FP32.
    """
    if not args.use_liger_kernel:
        return
    if args.device.type == "cpu":
        raise ValueError("use_liger_kernel=True: Liger's Triton kernels do not run on a CPU; remove it")
    heads = ", ".join(heads)
    if heads and (args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True):
        raise ValueError(
            f"use_liger_kernel=True multiplies 16-bit hidden states by the weight of {heads}, which is kept in FP32; "
            "set liger_kernel_config={'fused_linear_cross_entropy': False}"
        )
