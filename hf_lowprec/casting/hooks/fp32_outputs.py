"""FP32 outputs of a cast model: logits and other predictions as exact FP32 copies, so that losses of them are FP32.

A loss outside of the model gets the copies that the model returns (`return_float32`). A model of transformers that
computes its loss in its own `forward` gets FP32 copies from the layers that make its predictions
(`upcast_predictions`); for models of users, see `hooks/losses.py`.
"""

import torch
from torch import nn

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.hooks.forward_code import (
    arguments_of_forward,
    is_code_of_transformers,
    multiplies_tensors,
    names_in_forward,
    uses_torch_losses,
)
from hf_lowprec.casting.hooks.input_downcast import install_input_downcast
from hf_lowprec.casting.hooks.losses import install_fp32_torch_losses
from hf_lowprec.casting.hooks.module_hooks import install_model_output_upcast, install_output_upcast
from hf_lowprec.casting.model_parts import called_children, computing_children, is_model, prediction_layers
from hf_lowprec.casting.module_tree import ModuleTree, compiled_module


def return_float32(model: nn.Module, next_to_loss: bool = True) -> None:
    """Let a cast model return FP32 to the code that calls it, as accelerate's mixed precision does.

    16-bit tensors in the outputs, including those in tuples, lists, dicts (a `ModelOutput`) and dataclasses, are
    replaced by exact FP32 copies, except in caches. The loss is FP32 as well, even in models that compute it in
    `forward`.

    Trainer (with one of our `optim=` names) and `prepare_accelerator` call this automatically. A second call changes
    nothing, but `next_to_loss=True` takes precedence.

    Args:
        model: a model that `cast_model` has cast, or that contains one; changed in place. If you pass a submodule, it
            returns FP32 to the rest of the model too.
        next_to_loss: whether to copy outputs even in training calls that return a loss, at 4 bytes per logit. Trainer
            does not if its `compute_loss` and `training_step` use only the loss.

    Raises:
        ValueError: neither the model nor anything in it was cast.
    """
    dtypes = cast_dtypes(model)
    if not dtypes:
        raise ValueError(f"return_float32: {type(model).__name__} was not cast; call cast_model(model) before")
    for dtype in sorted(dtypes, key=str):
        upcast_predictions(model, dtype)
    install_model_output_upcast(compiled_module(model), next_to_loss)


def upcast_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Upcast the predictions of models of transformers that compute their loss in `forward`, so that the loss is FP32.

    The same for layers whose results a contrastive loss compares. The children of such a model, and of the modules
    around it, downcast their inputs, so that a 16-bit module that is given an FP32 prediction does not fail. If user
    code around the model multiplies tensors, or no layer is known to make the predictions, the model's outputs stay in
    16 bits, and only torch's losses compute in FP32.

    Args:
        model: a cast model, or one with cast models inside.
        dtype: the 16-bit dtype that it was cast to.
    """
    tree = ModuleTree.of(model)
    models = [name for name, module in tree.modules.items() if module is tree.root or is_model(module)]
    for name in models:
        layers = contrastive_layers(tree, name)
        if not layers and computes_loss_itself(tree.modules[name]):
            layers = prediction_layers(tree, name)
        upcast = [layer for layer in layers if tree.computes_in(layer, dtype)]
        if _user_code_multiplies(tree, name) if upcast else computes_loss_itself(tree.modules[name]):
            install_fp32_torch_losses(tree.modules[name])
            continue
        for layer in upcast:
            install_output_upcast(tree.modules[layer])
        for part in _parts_given_copies(tree, name, upcast):
            if tree.computes_in(part, dtype):
                install_input_downcast(tree.modules[part], dtype)


def _user_code_multiplies(tree: ModuleTree, model: str) -> bool:
    """Return whether user code around a model multiplies tensors: it may do so with the predictions and 16-bit ones."""
    parts = model.split(".") if model else []
    around = [tree.modules[".".join(parts[:depth])] for depth in range(len(parts))]
    return any(multiplies_tensors(module) and not is_code_of_transformers(module) for module in around)


def _parts_given_copies(tree: ModuleTree, model: str, upcast: list[str]) -> list[str]:
    """The modules that an FP32 prediction may be handed to: children of the model and of the modules around it."""
    if not upcast:
        return []
    names = model.split(".") if model else []
    around = [".".join(names[:depth]) for depth in range(len(names) + 1)]
    around += [parent for layer in upcast if (parent := layer.rpartition(".")[0]) not in around]
    return [part for module in around for part in called_children(tree, module)]


def computes_loss_itself(model: nn.Module) -> bool:
    """Return whether a model has a `forward` of transformers that uses torch's losses and no `loss_function`."""
    if "loss_function" in names_in_forward(model) or not uses_torch_losses(model):
        return False
    return is_code_of_transformers(model) and is_model(model)


def contrastive_layers(tree: ModuleTree, model: str) -> list[str]:
    """The layers whose results a contrastive loss of transformers compares (CLIP, SigLIP, FLAVA); empty without one.

    A model computes such a loss if its `forward` takes `return_loss`. Heads and projections are compared; where there
    are fewer than two of them, what models inside return (ALIGN, CLVP). A head may be a child of a model inside
    (FLAVA's `flava.text_projection`). X-CLIP multiplies with a matrix of its own, but by what a norm has rounded.
    """
    module = tree.modules[model]
    if not is_code_of_transformers(module) or "return_loss" not in arguments_of_forward(module):
        return []
    children = computing_children(tree, model)
    inside = [part for child in children if is_model(tree.modules[child]) for part in computing_children(tree, child)]
    called = children + [part for part in inside if part.rpartition(".")[2] in names_in_forward(module)]
    parts = [part for child in called for part in tree.callable_parts(child)]
    heads = [part for part in parts if not is_model(tree.modules[part])]
    if len(heads) > 1:
        return heads
    return [] if computes_loss_itself(module) else parts
