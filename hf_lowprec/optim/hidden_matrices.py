"""Which parameters are hidden matrices: what an optimizer for matrices takes, and leaves to another algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.optim.algorithm import ParamGroup


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices inside `model`, without its embeddings and heads: what `Muon(matrices=…)` takes.

    These are the weights of linear layers (`nn.Linear`, its subclasses, and GPT-2's `Conv1D`) and stacks of them:
    three-dimensional parameters named `…_proj`, as transformers' experts have. Embeddings, weights tied to them, the
    output embeddings and everything outside of a transformers model's base model are left out.

    Args:
        model: the model, before it is wrapped.

    Returns:
        The parameters themselves, each once.
    """
    outside = {
        id(param) for module in model.modules() if isinstance(module, nn.Embedding) for param in module.parameters()
    }
    for module in model.modules():
        outside |= {id(param) for head in _heads(module) for param in head.parameters()}
    found = {id(param): param for module in model.modules() for param in _matrices_of(module)}
    return [param for key, param in found.items() if key not in outside]


def _matrices_of(module: nn.Module) -> Iterator[nn.Parameter]:
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    for name, param in module.named_parameters(recurse=False):
        if (linear and param.ndim == 2) or (param.ndim == 3 and name.endswith("_proj")):
            yield param


def _heads(module: nn.Module) -> Iterable[nn.Module]:
    """What a model of transformers' make has besides its base model, and what it calls its output embeddings."""
    base = vars(module).get("_modules", {}).get(getattr(type(module), "base_model_prefix", None) or "")
    if base is not None:
        yield from (child for child in module.children() if child is not base)
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return
    if isinstance(head, nn.Module):
        yield head


def split_group(group: ParamGroup, matrices: Iterable[Tensor] | None) -> list[ParamGroup]:
    """`group` as one or two groups that say `use_muon`, in the order matrices, rest.

    Args:
        group: a param group; one that says so itself stays whole.
        matrices: the parameters that are matrices; None is all.
    """
    given = group["params"]
    if "use_muon" in group or matrices is None or isinstance(given, set):  # a set, which torch refuses, has no order
        return [{"use_muon": True, **group}]
    ids = {id(matrix) for matrix in matrices}
    params = [given] if isinstance(given, Tensor) else list(given)
    inside = [id(_tensor(param)) in ids for param in params]
    parts: list[ParamGroup] = []
    for wanted in (True, False) if params else (False,):
        part = {**group, "params": list(compress(params, [is_one is wanted for is_one in inside])), "use_muon": wanted}
        if "param_names" in group:
            part["param_names"] = list(compress(group["param_names"], [is_one is wanted for is_one in inside]))
        parts += [part] if part["params"] or not params else []
    return parts


def _tensor(param: Any) -> Any:
    return param[1] if isinstance(param, tuple) else param  # of named parameters


def check_matrix(param: torch.Tensor) -> None:
    """Raise ValueError unless `param` is a matrix or a stack of matrices."""
    if param.ndim not in (2, 3):
        raise ValueError(
            f"Muon steps matrices and stacks of them, not a parameter of shape {tuple(param.shape)}; give "
            "matrices=hf_lowprec.hidden_matrices(model), or put it in a group with use_muon=False"
        )
