"""Checks that no quantized weights are to be trained, and what a precision report says about them.

The checks run before anything is changed, and their messages say what to change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_lowprec.casting.quantized import holds_quantized_weights, is_quantized
from hf_lowprec.integrations import private_apis

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
"""The Python modules whose classes round weights in every forward pass -> what a message calls them.

They see the 16-bit weight and never its compensation, and their arithmetic expects the formats that they chose."""
_ADAPTERS = "train adapters on it (peft.get_peft_model), or load it without quantization_config"


def check_quantized_weights_are_frozen(model: nn.Module) -> None:
    """Check that training `model` trains no quantized weights, nor weights that are quantized in each forward pass.

    Frozen quantized weights below trainable adapters are fine.

    Raises:
        ValueError: it would; the message says what to change.
    """
    for defined_in, description in _defining_modules(model):
        recipe = next((text for name, text in _RECIPES.items() if f"{defined_in}.".startswith(f"{name}.")), None)
        if recipe:
            raise ValueError(
                f"the model is prepared for {recipe}: {description}; that does not go with pure BF16 training. Leave "
                "the preparation out, or train with another optim="
            )
    for name, param in model.named_parameters():
        if param.requires_grad and is_quantized(param):
            kind = f"{type(param.data).__name__} of {param.dtype}"
            raise ValueError(f"{name} is quantized ({kind}) and requires a gradient: {_ADAPTERS}")
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(model, "peft_config", None) or private_apis.has_adapters(model):
        return
    if getattr(model, "is_quantized", False):
        aware = getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
        what = "quantization-aware training" if aware else "training all weights"
        raise ValueError(
            f"{what} of a model with quantization_config={type(config).__name__} is not supported: {_ADAPTERS}"
        )
    quantized = next((name for name, module in model.named_modules() if holds_quantized_weights(module)), None)
    # Who trains adapters, or norms, has frozen the rest.
    if quantized is not None and all(param.requires_grad for param in model.parameters() if not is_quantized(param)):
        raise ValueError(
            f"the model trains as a whole, and its weights are quantized ({quantized}), so they would stay as they "
            f"are: {_ADAPTERS}"
        )


def check_trainable(model: nn.Module) -> None:
    """Raise ValueError if nothing of `model` is trainable."""
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "no parameter of the model requires a gradient, so nothing would be trained; adapters that are loaded to "
            "be trained further need PeftModel.from_pretrained(…, is_trainable=True)"
        )


def quantization_notes(model: nn.Module) -> list[str]:
    """Lines for the precision report about the quantized weights of `model`."""
    in_fp32 = [name for name, m in model.named_modules() if getattr(m, "compute_dtype", None) == torch.float32]
    if not any(holds_quantized_weights(model.get_submodule(name)) for name in in_fp32):
        return []
    return [
        f"{len(in_fp32)} quantized modules multiply in float32; bnb_4bit_compute_dtype=torch.bfloat16 in "
        "BitsAndBytesConfig is faster"
    ]


def _defining_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The Python modules that define the classes of the model's modules and parameters, each with a description."""
    for name, module in model.named_modules():
        kind = type(module)
        yield from ((cls.__module__, f"{name or 'it'} is {kind.__module__}.{kind.__name__}") for cls in kind.__mro__)
    for name, param in model.named_parameters():
        stored = type(param.data)
        yield stored.__module__, f"{name} is {stored.__module__}.{stored.__name__}"
