"""Models that compute their loss in `forward`: FP32 copies of what makes their predictions."""

import torch
from torch import nn

from hf_lowprec.casting.boundaries import install_widening
from hf_lowprec.casting.inputs import install_narrowing
from hf_lowprec.casting.losses import TORCH_LOSSES, names_in_forward
from hf_lowprec.casting.places import compiled_module, computing_children, is_model, narrows, predictions
from hf_lowprec.casting.policy import callable_parts


def widen_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Let what makes 16-bit predictions return exact FP32 copies, in models that compute their loss themselves.

    The loss is FP32 then, as that of models which have a `loss_function` (see `losses.py`). The children of such a
    model, and of the modules around it, narrow their inputs, so that what takes a copy costs no crash.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    root = compiled_module(model)
    models = [name for name, module in modules.items() if module is root or is_model(module)]
    for name in [name for name in models if computes_loss_itself(modules[name])]:
        wide = [part for part in predictions(name, modules) if narrows(part, modules, dtype)]
        for part in wide:
            install_widening(modules[part])
        names = name.split(".") if name else []
        around = [".".join(names[:depth]) for depth in range(len(names) + 1)] if wide else []
        children = [child for module in around for child in computing_children(module, modules)]
        for part in (part for child in children for part in callable_parts(child, modules)):
            if narrows(part, modules, dtype):
                install_narrowing(modules[part], dtype)


def computes_loss_itself(model: nn.Module) -> bool:
    """Whether a model's `forward` uses torch's losses and no `loss_function`.

    Of classes outside of transformers only those whose `forward` does not multiply with weights itself, as far as can
    be seen: it could go on computing with an FP32 prediction and 16-bit weights.
    """
    names = names_in_forward(model)
    if "loss_function" in names or TORCH_LOSSES.isdisjoint(names):
        return False
    if type(model).__module__.startswith("transformers."):
        return is_model(model)
    return "weight" not in names and all(param.dim() < 2 for param in model.parameters(recurse=False))
