"""Where inputs are narrowed, and which kept modules end the model, so that their output may stay in FP32."""

import torch
from torch import nn

from hf_lowprec.casting.float32_code import FLOAT32_INPUTS
from hf_lowprec.casting.policy import Modules, callable_parts, kind_of, top_of


def input_boundaries(modules: Modules, dtype: torch.dtype) -> list[str]:
    """The model, every model inside it, where a call from outside can arrive with FP32 tensors, and known modules."""
    root = compiled_module(modules[""])
    found = [n for n, module in modules.items() if module is root or is_model(module) or is_given_float32(n, modules)]
    return [name for name in found if narrows(name, modules, dtype)]


def compiled_module(model: nn.Module) -> nn.Module:
    """The model inside the wrapper of `torch.compile`, or `model` itself. Calls do not pass the wrapper's own hooks."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def output_heads(modules: Modules, kept: dict[str, str], dtype: torch.dtype) -> tuple[set[str], list[str]]:
    """The kept modules whose output stays in FP32, and the modules that narrow their inputs because of it.

    A kept module is a head if it is or contains what `get_output_embeddings()` of the model, or of a model inside,
    returns; or if `keep_fp32` keeps it and it is, among the children that hold floating tensors, the last child of
    the model, or the last child of that, and so on down. The last one written is the last one called by
    convention only: what was written before it narrows its inputs, so that an exception costs no crash.
    """
    names = {id(module): name for name, module in modules.items()}
    heads = set[str]()
    for module in [modules[""], *filter(is_model, modules.values())]:
        name = names.get(id(output_embeddings(module)))
        if name is not None and (top := top_of(name, kept)) is not None:
            heads |= set(callable_parts(top, modules))
    name, before = "", list[str]()
    while children := computing_children(name, modules):
        name = children[-1]
        before += children[:-1]
        if name not in kept:
            continue
        # A module with several names is called in several places.
        single = sum(module is modules[name] for module in modules.values()) == 1
        if name in heads or not single or not kept[name].startswith("keep_fp32"):
            break
        narrowing = [part for n in before for part in callable_parts(n, modules)]
        heads |= set(callable_parts(name, modules))
        return heads, [n for n in narrowing if narrows(n, modules, dtype)]
    return heads, []


def is_model(module: nn.Module) -> bool:
    """A model by the convention of transformers, whose `generate` calls the encoder inside without the whole."""
    return hasattr(type(module), "main_input_name") or "main_input_name" in vars(module)


def is_given_float32(name: str, modules: Modules) -> bool:
    """Whether the code around a module is known to call it with FP32."""
    parent, _, child = name.rpartition(".")
    return not FLOAT32_INPUTS.keys().isdisjoint(
        (type(modules[name]).__name__, f"{type(modules[parent]).__name__}.{child}")
    )


def narrows(name: str, modules: Modules, dtype: torch.dtype) -> bool:
    """Whether a module that is called holds 16-bit tensors: nothing inside a kept one does."""
    return dtype in _dtypes(modules[name]) and name in callable_parts(name, modules)


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    tensors = (*module.parameters(), *module.buffers())
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def computing_children(name: str, modules: Modules) -> list[str]:
    """Children of a module that hold floating tensors and are no losses, in the order in which they were written."""
    children = [f"{name}.{child}".lstrip(".") for child, module in modules[name]._modules.items() if module is not None]
    return [child for child in children if _dtypes(modules[child]) and kind_of(modules[child]) != "loss"]


def output_embeddings(module: nn.Module) -> nn.Module | None:
    """What turns hidden states into logits; not an embedding, which a tie makes the answer of a few models."""
    try:
        found = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) and not isinstance(found, nn.Embedding) else None


def predictions(model: str, modules: Modules) -> list[str]:
    """What makes a model's predictions: its output embeddings, and the last child with tensors that is no model itself.

    What is called auxiliary, and written after that child, belongs to it.
    """
    heads = [n for n in computing_children(model, modules) if not is_model(modules[n])]
    main = [k for k, n in enumerate(heads) if "auxiliary" not in n.rpartition(".")[2]]
    found = [part for n in heads[main[-1] if main else 0 :] for part in callable_parts(n, modules)]
    embeddings, inside = output_embeddings(modules[model]), dict.fromkeys(found, "")
    return found + [n for n, module in modules.items() if module is embeddings and top_of(n, inside) is None]
