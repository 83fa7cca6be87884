"""Checks that quantized weights are not trained, and the lines about them in a precision report.

The checks run before anything is changed, and their messages say what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_lowprec.casting.quantized import holds_quantized_weights, is_quantized
from hf_lowprec.integrations.adapters import has_adapters

_RECIPES = {
    "torchao.float8": "FP8 training (convert_to_float8_training)",
    "torchao.prototype.moe_training": "FP8 training of experts",
    "torchao.prototype.mx_formats": "MX training",
    "torchao.prototype.quantized_training": "quantized training",
    "torchao.quantization.qat": "quantization-aware training (QATConfig)",
    "torch.ao.nn.qat": "quantization-aware training (prepare_qat)",
    "torch.ao.nn.intrinsic.qat": "quantization-aware training (prepare_qat)",
    "torch.ao.quantization.fake_quantize": "quantization-aware training (prepare_qat)",
}
"""Python modules whose classes round weights in every forward pass -> their description in messages.

They see the 16-bit weight but not its compensation, and their arithmetic expects the formats that they chose."""
_ADAPTERS = "train adapters on it (peft.get_peft_model), or load it without quantization_config"


def check_quantized_weights_are_frozen(model: nn.Module) -> None:
    """Check that no trainable weight of `model` is quantized, or gets quantized in each forward pass.

    Frozen quantized weights below trainable adapters are fine.

    Raises:
        ValueError: such a weight would be trained; the message says what to do.
    """
    for defined_in, description in _defining_modules(model):
        recipe = next((text for name, text in _RECIPES.items() if f"{defined_in}.".startswith(f"{name}.")), None)
        if recipe:
            raise ValueError(
                f"the model is prepared for {recipe}: {description}. This is incompatible with pure BF16 training; "
                "skip the preparation, or train with another optim="
            )
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


def quantization_notes(model: nn.Module) -> list[str]:
    """Lines for the precision report about the quantized weights of `model`."""
    in_fp32 = [name for name, m in model.named_modules() if getattr(m, "compute_dtype", None) == torch.float32]
    if not any(holds_quantized_weights(model.get_submodule(name)) for name in in_fp32):
        return []
    return [
        f"{len(in_fp32)} quantized modules multiply in float32; bnb_4bit_compute_dtype=torch.bfloat16 in "
        "BitsAndBytesConfig would be faster"
    ]


def _defining_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The Python modules that define the classes of the model's modules and parameters, each with a description."""
    for name, module in model.named_modules():
        kind = type(module)
        yield from ((cls.__module__, f"{name or 'it'} is {kind.__module__}.{kind.__name__}") for cls in kind.__mro__)
    for name, param in model.named_parameters():
        stored = type(param.data)
        yield stored.__module__, f"{name} is {stored.__module__}.{stored.__name__}"
