"""Models that compute their loss in `forward`: FP32 copies of what makes their predictions."""

import torch
from torch import nn

from hf_lowprec.casting.boundaries import install_widening
from hf_lowprec.casting.inputs import install_narrowing
from hf_lowprec.casting.losses import arguments_of, names_in_forward, uses_torch_losses
from hf_lowprec.casting.places import compiled_module, computing_children, is_model, narrows, predictions
from hf_lowprec.casting.policy import Modules, callable_parts


def widen_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Let what makes 16-bit predictions return exact FP32 copies, in models that compute their loss themselves.

    The loss is FP32 then, as that of models which have a `loss_function` (see `losses.py`). The children of such a
    model, and of the modules around it, narrow their inputs, so that what takes a copy costs no crash.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    root = compiled_module(model)
    models = [name for name, module in modules.items() if module is root or is_model(module)]
    for name in models:
        parts = compared(name, modules)
        if not parts and computes_loss_itself(modules[name]):
            parts = predictions(name, modules)
        wide = [part for part in parts if narrows(part, modules, dtype)]
        for part in wide:
            install_widening(modules[part])
        names = name.split(".") if name else []
        around = [".".join(names[:depth]) for depth in range(len(names) + 1)] if wide else []
        around += [parent for part in wide if (parent := part.rpartition(".")[0]) not in around]
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
    if "loss_function" in names or not uses_torch_losses(model):
        return False
    if type(model).__module__.startswith("transformers."):
        return is_model(model)
    return "weight" not in names and not _has_matrices(model)


def compared(model: str, modules: Modules) -> list[str]:
    """The modules whose results a contrastive loss of transformers compares (CLIP, SigLIP, FLAVA).

    A model computes one if its `forward` takes `return_loss`. Heads and projections are compared; where there are fewer
    than two of them, what models inside return (ALIGN, CLVP). A head may be a child of a model inside (FLAVA's
    `flava.text_projection`). X-CLIP multiplies with a matrix of its own, but by what a norm has rounded.
    """
    module = modules[model]
    if not type(module).__module__.startswith("transformers.") or "return_loss" not in arguments_of(module):
        return []
    names = names_in_forward(module)
    children = computing_children(model, modules)
    inside = [part for child in children if is_model(modules[child]) for part in computing_children(child, modules)]
    called = children + [part for part in inside if part.rpartition(".")[2] in names]
    parts = [part for child in called for part in callable_parts(child, modules)]
    heads = [part for part in parts if not is_model(modules[part])]
    if len(heads) > 1:
        return heads
    return [] if computes_loss_itself(module) else parts


def _has_matrices(module: nn.Module) -> bool:
    """Whether a module has parameters of its own that can be multiplied with a prediction in another format."""
    return any(param.dim() > 1 for param in module.parameters(recurse=False))
