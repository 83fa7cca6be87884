"""Models of transformers that compute their loss themselves: FP32 copies of what makes their predictions."""

import torch
from torch import nn

from hf_lowprec.casting.boundaries import install_widening
from hf_lowprec.casting.inputs import install_narrowing
from hf_lowprec.casting.losses import TORCH_LOSSES, names_in_forward
from hf_lowprec.casting.places import computing_children, is_model, narrows, predictions
from hf_lowprec.casting.policy import callable_parts


def widen_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Let what makes 16-bit predictions return exact FP32 copies, in models that compute their loss themselves.

    The loss is FP32 then, as that of models which have a `loss_function` (see `losses.py`). The children of such a
    model, and of the modules around it, narrow their inputs, so that what takes a copy costs no crash. Only classes of
    transformers, which follow its conventions: another's code may go on computing with a prediction and its own 16-bit
    parameters.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in [name for name, module in modules.items() if computes_loss_itself(module)]:
        wide = [part for part in predictions(name, modules) if narrows(part, modules, dtype)]
        for part in wide:
            install_widening(modules[part])
        names = name.split(".") if name else []
        around = [".".join(names[:depth]) for depth in range(len(names) + 1)] if wide else []
        children = [child for module in around for child in computing_children(module, modules)]
        for part in (part for child in children for part in callable_parts(child, modules)):
            if narrows(part, modules, dtype):
                install_narrowing(modules[part], dtype)


def computes_loss_itself(module: nn.Module) -> bool:
    """Whether a model's class is one of transformers, and its `forward` uses torch's losses and no `loss_function`."""
    names = names_in_forward(module)
    ours = is_model(module) and type(module).__module__.startswith("transformers.")
    return ours and "loss_function" not in names and not TORCH_LOSSES.isdisjoint(names)
