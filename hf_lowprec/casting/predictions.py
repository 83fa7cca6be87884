"""Models that compute their loss themselves: what makes their predictions, and FP32 copies of those."""

import inspect

import torch
from torch import nn

from hf_lowprec.casting.boundaries import install_narrowing, install_widening
from hf_lowprec.casting.places import computing_children, is_model, narrows
from hf_lowprec.casting.policy import Modules, callable_parts

_TORCH_LOSSES = {*nn.modules.loss.__all__, *(n for n in dir(nn.functional) if n.endswith(("_loss", "cross_entropy")))}


def widen_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Let what makes 16-bit predictions return exact FP32 copies, in models that compute their loss themselves.

    The loss is FP32 then, as that of models which have a `loss_function` (see `losses.py`). What was written before
    the predictions narrows its inputs, so that another order of calls costs no crash.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in (name for name, module in modules.items() if computes_loss_itself(module)):
        ends, before = predictions(name, modules)
        wide = [n for n in ends if callable_parts(n, modules) == [n] and narrows(n, modules, dtype)]
        for end in wide:
            install_widening(modules[end])
        for part in (part for n in before if wide for part in callable_parts(n, modules)):
            if narrows(part, modules, dtype):
                install_narrowing(modules[part], dtype)


def computes_loss_itself(module: nn.Module) -> bool:
    """Whether a model's `forward` takes labels and calls torch's losses, and no `loss_function`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "labels" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    return "loss_function" not in code.co_names and not _TORCH_LOSSES.isdisjoint(code.co_names)


def predictions(model: str, modules: Modules) -> tuple[list[str], list[str]]:
    """What makes a model's predictions, and what was written before it.

    It is the last child with floating tensors, if that is not the base model; or what is that in it, if it is a model
    itself. What is called auxiliary comes after it and belongs to it.
    """
    children = computing_children(model, modules)
    main = [n for n in children if "auxiliary" not in n.rpartition(".")[2]]
    base = f"{model}.{getattr(type(modules[model]), 'base_model_prefix', '')}".lstrip(".")
    if not main or main[-1] == base:
        return [], []
    if is_model(modules[main[-1]]):
        return predictions(main[-1], modules)
    first = children.index(main[-1])
    return children[first:], children[:first]
