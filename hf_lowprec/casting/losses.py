"""Losses of a cast model are FP32, on exact FP32 copies of 16-bit predictions; otherwise, there is a warning.

- The `loss_function` of transformers models is not a module but a property. It chooses a function at each use, by
  `loss_type` or by assignment, so its getter is wrapped.
- torch's loss functions compute in FP32 while a user's `forward` runs, as they do under autocast. Everything else in
  the `forward` stays as it is.
- A loss outside the model gets the FP32 copies that the model returns once `return_float32` was called. From then on,
  if a transformers model computes its loss in `forward` (BERT, T5), the layers that make its predictions return copies,
  too. Until then, such a model computes its loss in 16 bits, as does user code that computes a loss by hand from
  16-bit predictions. This causes a warning, once per process.

Loss modules are kept in FP32 like norms (`fp32_rules.py`).
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.input_downcast import install_input_downcast
from hf_lowprec.casting.module_hooks import (
    install_model_output_upcast,
    install_output_conversion,
    remove_hooks,
    returns_float32,
    to_fp32_copies,
    upcast_inputs,
)
from hf_lowprec.casting.module_kinds import (
    TORCH_LOSS_FUNCTIONS,
    arguments_of_forward,
    is_code_of_transformers,
    is_model,
    multiplies_tensors,
    names_in_forward,
    uses_torch_losses,
)
from hf_lowprec.casting.module_tree import ModuleTree, compiled_module, path_to, prediction_layers
from hf_lowprec.casting.private_torch_apis import runs_in_checkpoint, trace_cross_entropy_as_function
from hf_lowprec.once import first_time
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name
from hf_lowprec.wrapped_method import unwrap_method, wrap_once

_ASSIGNED = "_loss_function"
"""The attribute in which transformers' property keeps a function that was assigned to it."""
# `nll_loss`, `kl_div` and `ctc_loss` take logarithms, which would round the losses if they were rounded.
_IN_FP32 = {functional.log_softmax, torch.log_softmax, Tensor.log_softmax}
_IN_FP32 |= {getattr(functional, name) for name in TORCH_LOSS_FUNCTIONS}
_IN_FP32.add(torch.cdist)  # takes no 16-bit numbers
_CALL = (
    "call hf_lowprec.return_float32(model) after cast_model(model) or, with Accelerate, "
    "prepare_accelerator(accelerator) before accelerator.prepare"
)
logger = logging.getLogger(__name__)


def fp32_loss(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a loss function with its floating arguments in FP32, at any depth of tuples, lists and dicts.

    Matching predictions with labels (DETR) needs this to run at all: `torch.cdist` takes no 16-bit numbers, and labels
    are FP32.
    """
    args, kwargs = upcast_inputs(None, args, kwargs)
    return function(*args, **kwargs)


def has_loss_function(module: nn.Module) -> bool:
    """Return whether a module has a `loss_function` of its own, by transformers' property."""
    # The class must have it (PEFT's wrappers forward attributes), and the loss must be its own, not a part's.
    chosen = getattr(type(module), "loss_function", None)
    if not isinstance(chosen, property) or chosen.fset is None:
        return False
    return getattr(module, "loss_type", None) is not None or _ASSIGNED in vars(module)


def install_fp32_loss(module: nn.Module) -> bool:
    """Make a module's `loss_function`, even one assigned later, compute in FP32. Return whether this is new."""
    return wrap_once(module, "loss_function", _returning_fp32_loss)


def _returning_fp32_loss(chosen: Callable[[Any], Callable[..., Any]], model: nn.Module) -> Callable[..., Any]:
    return functools.partial(fp32_loss, chosen(model))


class Fp32TorchLosses(TorchFunctionMode):
    """A mode in which torch's losses get exact FP32 copies of their 16-bit arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Activation checkpointing runs the code again in backward, without the mode, and compares dtypes.
        is_loss = func in _IN_FP32 or (func in (torch.logsumexp, Tensor.logsumexp) and not _keeps_dim(*args, **kwargs))
        if is_loss and not runs_in_checkpoint():
            args, kwargs = to_fp32_copies(args), to_fp32_copies(kwargs)
        return func(*args, **kwargs)


def _keeps_dim(input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> bool:
    """Return whether a `logsumexp` keeps its dimension: it may be attention's, multiplied by 16-bit values later."""
    return keepdim


def install_fp32_torch_losses(module: nn.Module) -> bool:
    """Let torch's losses compute in FP32 in a module's `forward`. Return whether this is new."""
    trace_cross_entropy_as_function()
    return wrap_once(module, "forward", _with_fp32_losses)


def _with_fp32_losses(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with Fp32TorchLosses():
        return forward(*args, **kwargs)


def remove_fp32_losses(module: nn.Module) -> None:
    """Undo `install_fp32_loss` and `install_fp32_torch_losses`."""
    unwrap_method(module, "loss_function", _returning_fp32_loss)
    unwrap_method(module, "forward", _with_fp32_losses)


def install_loss_warning(module: nn.Module) -> bool:
    """Make `module` warn if it returns a 16-bit loss in training. Return whether this is new."""
    is_new = warn_of_16_bit_loss not in module._forward_hooks.values()
    for part in module.modules():
        remove_hooks(part, (warn_of_16_bit_loss,))  # of an earlier cast of a part
    module.register_forward_hook(warn_of_16_bit_loss, prepend=True)  # before the loss is upcast
    return is_new


def warn_of_16_bit_loss(module: nn.Module, args: Any, output: Any) -> None:
    """Log the warning if `output` has a 16-bit loss that will be differentiated. A forward hook."""
    if torch.compiler.is_compiling():
        return
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    way_out = _CALL if not returns_float32(module) else "use torch's loss functions there, or predictions.float()"
    warn_if_in_16_bits(loss[0] if isinstance(loss, tuple) else loss, type(module).__name__, way_out)


def warn_if_in_16_bits(loss: Any, computed_by: str, way_out: str) -> None:
    """Log the warning if `loss` is a 16-bit number that will be differentiated."""
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    if is_loss and loss.dtype in LOW_PRECISION_DTYPES and first_time("loss in 16 bits"):
        text = "hf_lowprec: %s computes its loss in %s. For FP32, %s"
        logger.warning(text, computed_by, dtype_name(loss.dtype), way_out)


def return_float32(model: nn.Module, next_to_loss: bool = True) -> None:
    """Let a cast model return FP32 to the code that calls it, as accelerate's mixed precision does.

    16-bit tensors in the outputs, including those in tuples, lists, dicts (a `ModelOutput`) and dataclasses, are
    replaced by exact FP32 copies, except in caches. The loss is FP32 as well, even in models that compute it in
    `forward`.

    Trainer (with one of our `optim=` names) and `prepare_accelerator` call this automatically. A second call changes
    nothing, except that `next_to_loss=True` takes precedence.

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
        raise ValueError(f"return_float32: {type(model).__name__} was not cast; call cast_model(model) first")
    for dtype in sorted(dtypes, key=str):
        upcast_predictions(model, dtype)
    install_model_output_upcast(compiled_module(model), next_to_loss)


def upcast_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Upcast the predictions of transformers models that compute their loss in `forward`, so that the loss is FP32.

    Layers whose results a contrastive loss compares are treated in the same way. The children of such a model, and of
    the modules around it, downcast their inputs, so that a 16-bit module can take an FP32 prediction. If user code
    around the model multiplies tensors, or no layer is known to make the predictions, the model's outputs stay in 16
    bits, and only torch's losses compute in FP32.

    Args:
        model: a cast model, or one with cast models inside.
        dtype: the 16-bit dtype that it was cast to.
    """
    tree = ModuleTree.of(model)
    for name, module in tree.modules.items():
        if module is not tree.root and not is_model(module):
            continue
        layers = contrastive_layers(tree, name)
        if not layers and computes_loss_itself(module):
            layers = prediction_layers(tree, name)
        layers = [layer for layer in layers if tree.computes_in(layer, dtype)]
        path = path_to(name)
        around = [tree.modules[part] for part in path[:-1]]
        if not layers or any(multiplies_tensors(part) and not is_code_of_transformers(part) for part in around):
            if layers or computes_loss_itself(module):
                install_fp32_torch_losses(module)
            continue
        for layer in layers:
            install_output_conversion(tree.modules[layer], torch.float32)
        # Children of the model, of the modules around it, and of those around the layers may get a copy.
        path += [parent for layer in layers if (parent := layer.rpartition(".")[0]) not in path]
        for child in [child for parent in path for child in tree.called_children(parent)]:
            if tree.computes_in(child, dtype):
                install_input_downcast(tree.modules[child], dtype)


def computes_loss_itself(model: nn.Module) -> bool:
    """Return whether a model has a `forward` of transformers that uses torch's losses and no `loss_function`."""
    if "loss_function" in names_in_forward(model) or not uses_torch_losses(model):
        return False
    return is_code_of_transformers(model) and is_model(model)


def contrastive_layers(tree: ModuleTree, model: str) -> list[str]:
    """Return the layers whose results transformers' contrastive loss compares (CLIP, SigLIP, FLAVA); none without one.

    A model computes such a loss if its `forward` takes `return_loss`. It compares heads and projections or, if there
    are fewer than two of them, what models inside return (ALIGN, CLVP). A head may be a child of a model inside
    (FLAVA's `flava.text_projection`). X-CLIP also multiplies by a matrix of its own, after a norm that rounds.
    """
    module = tree.modules[model]
    if not is_code_of_transformers(module) or "return_loss" not in arguments_of_forward(module):
        return []
    children = tree.computing_children(model)
    inside = [part for child in children if is_model(tree.modules[child]) for part in tree.computing_children(child)]
    called = children + [part for part in inside if part.rpartition(".")[2] in names_in_forward(module)]
    parts = [part for child in called for part in tree.callable_parts(child)]
    heads = [part for part in parts if not is_model(tree.modules[part])]
    if len(heads) > 1:
        return heads
    return [] if computes_loss_itself(module) else parts
