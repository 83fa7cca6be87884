"""The cast itself."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.casting.arrival import arrival_warnings
from hf_lowprec.casting.boundaries import (
    install_float32,
    install_rounding,
    install_widening,
    remove_boundaries,
    remove_upcast_outputs,
)
from hf_lowprec.casting.dtype_errors import install_advice, remove_advice
from hf_lowprec.casting.float32_code import FLOAT32_PREDICTIONS, FLOAT32_RESULTS
from hf_lowprec.casting.inputs import forget_numbers, install_narrowing, remove_narrowing
from hf_lowprec.casting.losses import narrow_loss, widen_loss
from hf_lowprec.casting.places import compiled_module, computing_children, input_boundaries, narrows, output_heads
from hf_lowprec.casting.policy import (
    Entry,
    Modules,
    Owners,
    callable_parts,
    is_bounded,
    kind_of,
    needs_float32,
    plan,
    top_of,
)
from hf_lowprec.casting.quantized import is_quantized, presents_float32, untouchable
from hf_lowprec.casting.report import CastReport, DtypeTotal
from hf_lowprec.casting.rotary import restore
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor"}
_MARK = "_low_precision_cast"

Keep = Entry | Iterable[Entry]


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep_fp32: Keep = ()) -> CastReport:
    """Cast `model` in place to `dtype`, keeping what needs FP32, and return what was done.

    Floating parameters and buffers of any shape go to `dtype`, except those of norms (by class or name), of rotary
    embeddings and other tables named `inv_freq`, of losses, of the few modules whose code needs FP32
    (`float32_code.py`), in the model's `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` (expressions searched
    in qualified names, as in transformers' loading) and in `keep_fp32`. `Parameter` objects and ties survive,
    gradients are cast along, every owner of a kept tensor is kept. A second call changes nothing, unless the model
    grew. Quantized weights stay as they are, and so do the scales in the same modules; a module whose quantized
    weights present themselves as FP32 is kept.

    Calls of a kept module pass its boundary, which widens floating inputs to FP32 and rounds floating outputs to
    `dtype`. Losses are computed in FP32: modules that are one by name and have no parameters but single numbers (a
    temperature), and the `loss_function` of models as transformers has it, get exact FP32 copies of what is handed to
    them, and their result stays FP32. Parameters of distributions, as transformers' series models predict them, are
    FP32 copies too. Apart from these, only a kept output head leaves its output in FP32: a kept module that is or
    contains what `get_output_embeddings()` returns, or that `keep_fp32` names and that is the last child with floating
    tensors (or the last of that child, and so on). Calls of `model`, of each model in it (a module with a
    `main_input_name`, as transformers has it), and of the few modules that the code around them is known to call with
    FP32 (`float32_code.py`), that hold 16-bit tensors round activations wider than `dtype` among their arguments to
    `dtype`, at any depth of tuples, lists and dicts. Activations alone are rounded (`activations.py`); by the name of
    an argument, also a positional one, or of a dict's key, these are not:

    - labels and targets, which losses are measured against (where torch's losses do not mix formats, as in 2.11, they
      are rounded too);
    - tensors of no or one dimension: counts, temperatures, weights of classes or samples, timesteps, noise levels;
    - further ones whose name has a word for numbers, weights or positions, as `sample_weight`, `sigmas`, `bbox`.

    Those with "mask" in their name are activations, clamped to `dtype`'s finite range from below, so that FP32's lowest
    number does not become -inf. What a module computes with FP32 numbers is FP32: from the first call that brings some,
    of a dimension or more, its children round their inputs like it, and what makes its predictions returns FP32 copies
    if it computes a loss with weights itself. `torch.compile(fullgraph=True)` needs one such call before it. Integer
    tensors that are points in time by name (`timesteps`, `t`) count as such numbers outside of transformers, since
    diffusion models make FP32 sines of them; any `torch.compile` needs a call with them before it. Where a module
    multiplies FP32 numbers with its own 16-bit parameters (`points @ self.weight`), pass them in 16 bits if they are
    activations. Methods other than a module's call pass no boundary.

    Where a module's code mixes formats all the same (`x.float()` before a linear layer), the error that torch raises in
    a call of `model` also says which module that was, what to give as `keep_fp32`, and which FP32 numbers came in.

    Args:
        model: any module, on any device (meta included), before DDP or FSDP wraps it.
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_fp32: one entry or several. A string is a case-sensitive glob (`fnmatch`; `*` crosses dots) for a
            whole qualified name of a module, parameter or buffer, or for what follows any dot in one:
            `"lm_head"`, `"layers.0.*"`, `"*.mlp.down_proj"`. A module is kept with all below it, a tensor
            with the childless module that owns it (else alone, no boundary). A class keeps its instances.

    Raises:
        ValueError: another `dtype`, or not an earlier cast's; an entry that matches nothing, covers quantized
            weights or names what an earlier cast has rounded; a model already wrapped or sharded.
        TypeError: an entry is neither a string nor a module class.
    """
    keep = (keep_fp32,) if isinstance(keep_fp32, str | type) else tuple(keep_fp32)
    marks = _check(model, dtype, keep)
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = _owners(modules)
    inherited = tuple(dict.fromkeys(entry for _, entries in marks for entry in entries))
    kept, kept_tensors = plan(modules, owners, keep, inherited)
    known = plan(modules, owners, (), inherited)[1] if marks else kept_tensors
    _check_plan(owners, kept, kept_tensors, known)
    before = _totals(owners)
    tensors = _convert_tensors(modules, owners, kept, kept_tensors, dtype)
    boundaries = _install_boundaries(modules, kept, tensors["kept"], dtype)
    for module in modules.values():
        setattr(module, _MARK, vars(module).get(_MARK, (dtype, ())))  # a part is recognised without the whole
    setattr(model, _MARK, (dtype, tuple(dict.fromkeys(inherited + keep))))
    fresh = boundaries.pop("fresh")
    return CastReport(
        dtype=dtype,
        before=before,
        after=_totals(owners),
        already_cast=bool(marks),
        changed=bool(fresh or tensors["cast"] or tensors["upcast"] or tensors["restored"]),
        **tensors,
        **boundaries,
    )


def cast_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes to which `cast_model` has cast the model or parts of it; empty if it was not cast."""
    return {mark[0] for module in model.modules() if (mark := vars(module).get(_MARK))}


def _owners(modules: Modules) -> Owners:
    """Who has which tensor."""
    owners: Owners = {}
    for name, module in modules.items():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((name, f"{name}.{attribute}".lstrip("."), tensor))
    return owners


def _to(tensor: Tensor, dtype: torch.dtype) -> None:
    """Convert a tensor, and its gradient, where they are."""
    tensor.data = tensor.data.to(dtype)
    if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(dtype)


def _convert_tensors(
    modules: Modules, owners: Owners, kept: dict[str, str], kept_tensors: dict[int, str], dtype: torch.dtype
) -> dict[str, Any]:
    """Give every tensor the format that it is to have; the report's fields about them."""
    fixed = untouchable(owners)
    reported, upcast, arrived = dict[str, str](), dict[str, torch.dtype](), dict[str, tuple[Tensor, torch.dtype]]()
    cast, restored, warnings, untouched = list[str](), list[str](), list[str](), dict[str, str]()
    for key, group in owners.items():
        name, tensor, old = group[0][1], group[0][2], group[0][2].dtype
        if key in fixed:
            untouched[name] = fixed[key]
            if not presents_float32(tensor):
                continue
        else:
            _to(tensor, torch.float32 if key in kept_tensors else dtype)
            if key not in kept_tensors:
                cast += [name] if old != dtype else []
                continue
            upcast |= {name: old} if old != torch.float32 else {}
        for path, name, _ in group:
            top = top_of(path, kept)
            reported[name if top is None else top] = kept_tensors[key] if top is None else kept[top]
        if kind_of(modules[group[0][0]]) == "rotary":
            restore(modules[group[0][0]], *group[0][1:], restored, warnings)
        else:
            arrived[group[0][1]] = (tensor, old)
    warnings += arrival_warnings(modules, arrived)
    reported |= {n: kept[n] for n in kept if top_of(n, kept) == n and needs_float32(modules[n])}
    return {
        "cast": tuple(cast),
        "kept": reported,
        "upcast": upcast,
        "restored": tuple(restored),
        "untouched": untouched,
        "warnings": tuple(warnings),
    }


def _install_boundaries(
    modules: Modules, kept: dict[str, str], reported: dict[str, str], dtype: torch.dtype
) -> dict[str, Any]:
    """Let every module give its neighbours what they expect; the report's fields about it, and `fresh`: was any new?"""
    root = compiled_module(modules[""])
    # What returned FP32 to code outside returns 16 bits to the model that it has become a part of.
    fresh = [remove_upcast_outputs(module) for module in modules.values() if module is not root]
    for module in modules.values() if any(fresh) else ():
        forget_numbers(module)
    tops = [top for name in reported if name in modules for top in callable_parts(name, modules)]
    bounded = tuple(name for name in tops if is_bounded(modules[name]))
    inputs = input_boundaries(modules, dtype)
    heads, before_head = output_heads(modules, kept, dtype)
    inputs += [name for name in before_head if name not in inputs]
    losses = [name for name in bounded if kind_of(modules[name]) == "loss"]
    exact = heads.union(losses)
    fresh += [install_float32(modules[name], dtype, name not in exact) for name in bounded]
    widened = {name: new for name, module in modules.items() if (new := widen_loss(module)) is not None}
    fresh += widened.values()
    results = {n: FLOAT32_RESULTS.get(type(m).__name__, "") for n, m in modules.items() if top_of(n, kept) is None}
    results = {name: why for name, why in results.items() if why}
    fresh += [install_rounding(modules[name], dtype) for name in results]
    predictions = {
        part: why
        for name, module in modules.items()
        if (why := FLOAT32_PREDICTIONS.get(type(module).__name__))
        for child in computing_children(name, modules)
        for part in callable_parts(child, modules)
        if narrows(part, modules, dtype)
    }
    fresh += [install_widening(modules[name]) for name in predictions]
    fresh += [install_narrowing(modules[name], dtype) for name in inputs]
    if any(modules[name] is root for name in inputs):
        install_advice(root)
    return {
        "boundaries": bounded,
        "inputs": tuple(inputs),
        "heads": tuple(name for name in bounded if name in heads),
        "losses": (*losses, *widened),
        "results": results,
        "predictions": predictions,
        "fresh": any(fresh),
    }


def uncast_model(model: nn.Module) -> None:
    """Make a model that was cast an FP32 model again, in place: tensors of 16 bits widen, boundaries go.

    What the cast has rounded stays rounded. `Parameter` objects and ties survive; quantized weights stay. A model that
    was not cast keeps its tensors' values and computes in FP32.
    """
    for module in model.modules():
        remove_boundaries(module)
        remove_narrowing(module)
        remove_advice(module)
        narrow_loss(module)
        vars(module).pop(_MARK, None)
    owners = _owners(dict(model.named_modules(remove_duplicate=False)))
    for key in owners.keys() - untouchable(owners).keys():
        tensor = owners[key][0][2]
        if tensor.dtype in LOW_PRECISION_DTYPES:
            _to(tensor, torch.float32)


def _check(model: nn.Module, dtype: torch.dtype, keep: tuple[Entry, ...]) -> list[tuple[torch.dtype, Any]]:
    if dtype not in LOW_PRECISION_DTYPES:
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, not {dtype!r}")
    for entry in keep:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"keep_fp32 takes names (str) and torch.nn.Module classes, not {entry!r}")
    for module in model.modules():
        names = {type(tensor).__name__ for tensor in module.parameters(recurse=False)}
        if found := _WRAPPERS & names.union(cls.__name__ for cls in type(module).__mro__):
            raise ValueError(f"cast before prepare: the model is already wrapped or sharded ({min(found)})")
    marks = [mark for module in model.modules() if (mark := vars(module).get(_MARK))]
    if earlier := {str(mark[0]) for mark in marks if mark[0] != dtype}:
        raise ValueError(f"the model was already cast to {min(earlier)}, so it cannot be cast to {dtype}")
    return marks


def _check_plan(owners: Owners, kept: dict[str, str], kept_tensors: dict[int, str], known: dict[int, str]) -> None:
    """Raise ValueError if `keep_fp32` names what has no FP32 form, or no longer has one.

    Args:
        owners: every tensor's.
        kept: modules that are to stay in FP32, and why.
        kept_tensors: tensors of these, by id.
        known: those of them that an earlier cast has kept as well.
    """
    for path, name, tensor in (owners[key][0] for key in kept_tensors):
        why = kept.get(top_of(path, kept) or "", kept_tensors[id(tensor)])
        if why.startswith("keep_fp32") and is_quantized(tensor):
            raise ValueError(
                f"{why} covers {name}, which is quantized and has no FP32 form; name modules without quantized weights"
            )
    late = [owners[key][0] for key in kept_tensors.keys() - known.keys()]
    if rounded := [name for _, name, tensor in late if tensor.dtype in LOW_PRECISION_DTYPES]:
        raise ValueError(f"keep_fp32 comes too late for {min(rounded)}: an earlier cast has rounded it")


def _totals(owners: Owners) -> dict[torch.dtype, DtypeTotal]:
    totals: dict[torch.dtype, DtypeTotal] = {}
    for (_, _, tensor), *_ in owners.values():
        n, old = tensor.numel(), totals.get(tensor.dtype, DtypeTotal(0, 0, 0))
        own, size = isinstance(tensor, nn.Parameter), n * tensor.element_size()
        totals[tensor.dtype] = DtypeTotal(old.parameters + n * own, old.buffers + n * (not own), old.bytes + size)
    return totals
