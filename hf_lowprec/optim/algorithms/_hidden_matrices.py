"""Hidden matrices: the parameters that a matrix optimizer (Muon) updates; another algorithm updates the rest.

`hidden_matrices` finds them in a model; `split_group` splits a param group into matrices and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import compress

from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.sharding import full_shape


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weight matrices inside `model`, without its embeddings and heads, for `Muon(matrices=…)`.

    Included are the weights of linear layers (`nn.Linear`, its subclasses, and GPT-2's `Conv1D`) and stacks of these
    weights: three-dimensional parameters named `…_proj`, or of modules whose class is named `…Experts…`. Excluded are
    weights tied to an embedding, `get_output_embeddings()`, the modules of a transformers model outside its base model,
    the routers of experts, and matrices with a single row or column.

    A weight that joins several projections, such as `gate_up_proj` or a fused QKV, is one matrix.

    Args:
        model: the model, before it is wrapped.

    Returns:
        The parameters, each once.
    """
    excluded = {
        id(param) for module in model.modules() if isinstance(module, nn.Embedding) for param in module.parameters()
    }
    for module in model.modules():
        others = [module] if re.search("Router|TopKGating", type(module).__name__) else _heads(module)
        excluded |= {id(param) for other in others for param in other.parameters()}
    matrices = {id(param): param for module in model.modules() for param in _matrices_of(module)}
    return [param for key, param in matrices.items() if key not in excluded]


def _matrices_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices and stacks of matrices that belong to `module` itself."""
    kind = type(module).__name__
    for name, param in module.named_parameters(recurse=False):
        shape = full_shape(param)
        linear = isinstance(module, nn.Linear) or kind == "Conv1D"
        stacked = name.endswith("_proj") or "Experts" in kind
        if (linear if len(shape) == 2 else stacked and len(shape) == 3) and 1 not in shape[-2:]:
            yield param


def _heads(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the output embeddings of a transformers model, and its children other than its base model."""
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
    """Split `group` into its matrices (`use_muon=True`) and its other parameters (`use_muon=False`).

    Args:
        group: a param group. It is not split if it already has `use_muon`.
        matrices: the parameters that are matrices; None means all.

    Returns:
        The groups that are not empty: one or two.
    """
    params = group.get("params")
    if "use_muon" in group or matrices is None or params is None or isinstance(params, set):  # the last two are refused
        return [{"use_muon": True, **group}]
    ids = {id(matrix) for matrix in matrices}
    params = [params] if isinstance(params, Tensor) else list(params)  # a named parameter is `(name, parameter)`
    is_matrix = [id(param[1] if isinstance(param, tuple) else param) in ids for param in params]
    parts: list[ParamGroup] = []
    for use_muon in (True, False) if params else (False,):
        selected = [each is use_muon for each in is_matrix]
        part = {**group, "params": list(compress(params, selected)), "use_muon": use_muon}
        if "param_names" in group:
            part["param_names"] = list(compress(group["param_names"], selected))
        parts += [part] if part["params"] or not params else []
    return parts
