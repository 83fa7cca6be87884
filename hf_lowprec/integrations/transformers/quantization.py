"""Checks that quantized weights are not trained. They run before anything is changed."""

from __future__ import annotations

from torch import nn

from hf_lowprec.casting.quantized import holds_quantized_weights, is_quantized
from hf_lowprec.integrations.adapters import has_adapters

_ADAPTERS = "train adapters on it (peft.get_peft_model), or load it without quantization_config"


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
