"""Models of transformers that compute their loss themselves: FP32 copies of what makes their predictions."""

import torch
from torch import nn

from hf_lowprec.casting.boundaries import install_narrowing, install_widening
from hf_lowprec.casting.losses import names_in_forward
from hf_lowprec.casting.places import computing_children, is_model, narrows, output_embeddings
from hf_lowprec.casting.policy import Modules, callable_parts, top_of

_TORCH_LOSSES = {*nn.modules.loss.__all__, *(n for n in dir(nn.functional) if n.endswith(("_loss", "cross_entropy")))}


def widen_predictions(model: nn.Module, dtype: torch.dtype) -> None:
    """Let what makes 16-bit predictions return exact FP32 copies, in models that compute their loss themselves.

    The loss is FP32 then, as that of models which have a `loss_function` (see `losses.py`). The children of such a
    model narrow their inputs, so that what takes a copy costs no crash. Only classes of transformers, which follow its
    conventions: another's code may go on computing with a prediction and its own 16-bit parameters.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in [name for name, module in modules.items() if computes_loss_itself(module)]:
        wide = [part for part in predictions(name, modules) if narrows(part, modules, dtype)]
        for part in wide:
            install_widening(modules[part])
        for part in (part for child in computing_children(name, modules) for part in callable_parts(child, modules)):
            if wide and narrows(part, modules, dtype):
                install_narrowing(modules[part], dtype)


def computes_loss_itself(module: nn.Module) -> bool:
    """Whether a model's class is one of transformers, and its `forward` uses torch's losses and no `loss_function`."""
    names = names_in_forward(module)
    ours = is_model(module) and type(module).__module__.startswith("transformers.")
    return ours and "loss_function" not in names and not _TORCH_LOSSES.isdisjoint(names)


def predictions(model: str, modules: Modules) -> list[str]:
    """What makes a model's predictions: its output embeddings, and the last child with tensors that is no model itself.

    What is called auxiliary, and written after that child, belongs to it.
    """
    heads = [n for n in computing_children(model, modules) if not is_model(modules[n])]
    main = [k for k, n in enumerate(heads) if "auxiliary" not in n.rpartition(".")[2]]
    found = [part for n in heads[main[-1] if main else 0 :] for part in callable_parts(n, modules)]
    embeddings, inside = output_embeddings(modules[model]), dict.fromkeys(found, "")
    return found + [n for n, module in modules.items() if module is embeddings and top_of(n, inside) is None]
