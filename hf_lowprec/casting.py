"""Cast a model to a 16-bit format in place, keeping what needs FP32 in FP32.

A kept module gets a boundary (floating inputs to FP32, floating outputs to the 16-bit format), so that its
neighbours see one format. transformers is not imported: its modules are known by class name and attributes.
"""

import difflib
import fnmatch
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM_NAME = re.compile(r"Norm(\d+[a-z]?|Gated|PerHead)*$", re.IGNORECASE)
_ROTARY_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor"}
# Not every floating dtype: 8-bit and 4-bit floats are a quantizer's storage, which only it may convert.
_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_MARK = "_low_precision_cast"

Entry = str | type[nn.Module]
Keep = Entry | Iterable[Entry]
Modules = dict[str, nn.Module]
Kept = tuple[dict[str, str], dict[int, str]]  # module name -> why, id of a tensor -> why
Owners = dict[int, list[tuple[str, str, Tensor]]]  # id of a tensor -> (module name, tensor name, tensor)


class DtypeTotal(NamedTuple):
    """Elements and bytes held in one dtype; a tied tensor counts once."""

    parameters: int
    buffers: int
    bytes: int


@dataclass(frozen=True)
class CastReport:
    """What one call of `cast_model` found and did; `str()` of it is for people. Names are qualified."""

    dtype: torch.dtype
    cast: tuple[str, ...]  # tensors this call converted to `dtype`
    kept: dict[str, str]  # FP32 module (top of the kept subtree) or single tensor -> why
    boundaries: tuple[str, ...]  # modules that have a boundary
    upcast: dict[str, torch.dtype]  # kept tensor -> the dtype it came in; its lost bits stay lost
    restored: tuple[str, ...]  # rotary buffers that had been rounded and were recomputed
    untouched: dict[str, str]  # tensor that is not a plain 16 to 64-bit float -> what it is
    warnings: tuple[str, ...]
    before: dict[torch.dtype, DtypeTotal]
    after: dict[torch.dtype, DtypeTotal]
    already_cast: bool  # an earlier call had cast this model or a part of it
    changed: bool  # this call changed a tensor or a boundary

    def __str__(self) -> str:
        lines = [f"{'already ' * self.already_cast}cast to {self.dtype}: "]
        lines[0] += f"{len(self.cast)} tensors converted" if self.changed else "nothing changed"
        for total, when in ((self.before, "before"), (self.after, "after")):
            for dtype, n in sorted(total.items(), key=str):
                counts = f"{n.parameters:,} parameters, {n.buffers:,} buffer elements, {n.bytes:,} bytes"
                lines.append(f"  {when:<6} {dtype!s:<14} {counts}")
        for title, entries in (
            ("kept in float32", self.kept),
            ("upcast to float32", {name: f"was {dtype}" for name, dtype in self.upcast.items()}),
            ("recomputed from the config", dict.fromkeys(self.restored, "had been rounded")),
            ("untouched", self.untouched),
        ):
            stars = ((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), why) for name, why in entries.items())
            groups = Counter(stars)
            lines += [f"  {title}:"] * bool(groups)
            lines += [f"    {n or '(model)'}{f' (x{k})' * (k > 1)}: {why}" for (n, why), k in groups.items()]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep_fp32: Keep = ()) -> CastReport:
    """Cast `model` in place to `dtype`, keeping what needs FP32, and return what was done.

    Floating parameters and buffers of any shape go to `dtype`, except those of norms (by class or name), of
    rotary embeddings, in the model's `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` (expressions
    searched in qualified names, as in transformers' loading) and in `keep_fp32`. `Parameter` objects and ties
    survive, gradients are cast along, every owner of a kept tensor is kept. A second call changes nothing,
    unless the model grew. Calls of a kept module pass its boundary, its other methods do not.

    Args:
        model: any module, on any device (meta included), before DDP or FSDP wraps it.
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_fp32: one entry or several. A string is a case-sensitive glob (`fnmatch`; `*` crosses dots) for a
            whole qualified name of a module, parameter or buffer, or for what follows any dot in one:
            `"lm_head"`, `"layers.0.*"`, `"*.mlp.down_proj"`. A module is kept with all below it, a tensor
            with the childless module that owns it (else alone, no boundary). A class keeps its instances.

    Raises:
        ValueError: another `dtype`, or not an earlier cast's; an entry that matches nothing or names what an
            earlier cast has rounded; a model already wrapped or sharded.
        TypeError: an entry is neither a string nor a module class.
    """
    keep = (keep_fp32,) if isinstance(keep_fp32, str | type) else tuple(keep_fp32)
    marks = _check(model, dtype, keep)
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: Owners = {}
    for name, module in modules.items():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((name, f"{name}.{attribute}".lstrip("."), tensor))
    inherited = tuple(dict.fromkeys(entry for _, entries in marks for entry in entries))
    kept, kept_tensors = _plan(modules, owners, keep, inherited)
    known = _plan(modules, owners, (), inherited)[1] if marks else kept_tensors
    late = [owners[key][0] for key in kept_tensors.keys() - known.keys()]
    if rounded := [name for _, name, tensor in late if tensor.dtype in _HALVES]:
        raise ValueError(f"keep_fp32 comes too late for {min(rounded)}: an earlier cast has rounded it")
    before = _totals(owners)
    reported, upcast = dict[str, str](), dict[str, torch.dtype]()
    cast, restored, warnings, untouched = list[str](), list[str](), list[str](), dict[str, str]()
    for key, group in owners.items():
        name, tensor, old = group[0][1], group[0][2], group[0][2].dtype
        if type(tensor.data) is not Tensor or old not in _CASTABLE:
            untouched[name] = f"{type(tensor.data).__name__} of {old}"
            continue
        target = torch.float32 if key in kept_tensors else dtype
        tensor.data = tensor.data.to(target)
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(target)
        if key not in kept_tensors:
            cast += [name] if old != dtype else []
            continue
        upcast |= {name: old} if old != torch.float32 else {}
        for path, name, _ in group:
            top = _top(path, kept)
            reported[name if top is None else top] = kept_tensors[key] if top is None else kept[top]
        if _kind(modules[group[0][0]]) == "rotary":
            _restore(modules[group[0][0]], *group[0][1:], restored, warnings)
    tops = [top for name in reported if name in modules for top in _callable(name, modules)]
    boundaries = tuple(name for name in tops if _kind(modules[name]) != "rotary")
    fresh = [name for name in boundaries if _enter not in modules[name]._forward_pre_hooks.values()]
    for module in {id(modules[name]): modules[name] for name in fresh}.values():
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        # First, so that every other forward hook sees what the neighbours see.
        leave = _leave_bfloat16 if dtype == torch.bfloat16 else _leave_float16
        module.register_forward_hook(leave, prepend=True)
    setattr(model, _MARK, (dtype, tuple(dict.fromkeys(inherited + keep))))
    return CastReport(
        *(dtype, tuple(cast), reported, boundaries, upcast, tuple(restored), untouched, tuple(warnings)),
        *(before, _totals(owners), bool(marks), bool(cast or upcast or restored or fresh)),
    )


def _check(model: nn.Module, dtype: torch.dtype, keep: tuple[Entry, ...]) -> list[tuple[torch.dtype, Any]]:
    if dtype not in _HALVES:
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


def _top(name: str, kept: dict[str, str]) -> str | None:
    """The outermost kept module that `name` lies in, itself included."""
    above = (".".join(name.split(".")[:i]) for i in range(name.count(".") + 2))
    return next((top for top in above if top in kept), None)


def _totals(owners: Owners) -> dict[torch.dtype, DtypeTotal]:
    totals: dict[torch.dtype, DtypeTotal] = {}
    for (_, _, tensor), *_ in owners.values():
        n, old = tensor.numel(), totals.get(tensor.dtype, DtypeTotal(0, 0, 0))
        own, size = isinstance(tensor, nn.Parameter), n * tensor.element_size()
        totals[tensor.dtype] = DtypeTotal(old.parameters + n * own, old.buffers + n * (not own), old.bytes + size)
    return totals


def _kind(module: nn.Module) -> str:
    """`"norm"`, `"rotary"` or `""`."""
    names = [cls.__name__ for cls in type(module).__mro__]
    inner = [m for m in module.modules() if m is not module and (m._parameters or m._buffers)]
    # By name alone, whole encoders (Wav2Vec2EncoderStableLayerNorm) and norms that own linears would count.
    if isinstance(module, _NORMS) or any(map(_NORM_NAME.search, names)):
        return "norm" if all(_kind(m) == "norm" for m in inner) else ""
    return "rotary" if any(map(_ROTARY_NAME.search, names)) and not inner else ""


def _plan(modules: Modules, owners: Owners, new: tuple[Entry, ...], earlier: tuple[Entry, ...]) -> Kept:
    kept = {n: f"{kind} ({type(m).__name__})" for n, m in modules.items() if (kind := _kind(m))}
    tensors: dict[int, str] = {}
    entries = [(key, path, name) for key, group in owners.items() for path, name, _ in group]
    leaves = {name for name, module in modules.items() if not module._modules}
    for prefix, module in modules.items():
        for source in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            # Not getattr: PEFT's wrappers forward it to the model inside, where names have another prefix.
            listed = vars(module).get(source, getattr(type(module), source, None))
            if not isinstance(listed, list | tuple | set | frozenset) or not listed:
                continue
            search = re.compile("|".join(sorted(listed)).replace("*", ".*")).search
            why, start = f"named in {type(module).__name__}.{source}", f"{prefix}.".lstrip(".")
            hits = [name for name in modules if name.startswith(start) and search(name[len(start) :])]
            kept = dict.fromkeys(hits, why) | kept
            # Without a boundary: around a tensor named alone the model's own code converts (routers, sinks).
            tensors |= {k: why for k, _, n in entries if n.startswith(start) and search(n[len(start) :])}
    for entry in (*earlier, *new):
        if isinstance(entry, str):
            word, match = entry, re.compile(fnmatch.translate(f"*.{entry}")).match
            hits = [name for name in modules if name and match(f".{name}")]
            owned = [(key, path) for key, path, name in entries if match(f".{name}")]
        else:
            word, owned = entry.__name__, []
            hits = [name for name, module in modules.items() if isinstance(module, entry)]
        label = f"keep_fp32 {word!r}"
        if not hits and not owned and entry in new:
            names = {*modules, *(name for _, _, name in entries)}
            names |= {name.rpartition(".")[2] for name in names} | {type(m).__name__ for m in modules.values()}
            near = difflib.get_close_matches(word.strip("*."), sorted(names), n=5, cutoff=0.4)
            raise ValueError(f"{label} matches no module or tensor; near: {', '.join(near) or 'nothing'}")
        kept = dict.fromkeys((*hits, *(path for _, path in owned if path in leaves)), label) | kept
        tensors |= {key: label for key, path in owned if path not in leaves}
    size = -1
    while size != len(kept):
        size = len(kept)
        for key, group in owners.items():
            inside = next((name for path, name, _ in group if _top(path, kept) is not None), None)
            if inside is not None:
                tensors.setdefault(key, f"tied to {inside}")
            # One module computes in one dtype: a childless owner of a tied, kept tensor is kept as a whole.
            for path, name, _ in group if key in tensors and len({path for path, *_ in group}) > 1 else ():
                if path in leaves and _top(path, kept) is None:
                    kept[path] = f"tied to {inside or next(n for _, n, _ in group if n != name)}"
    return kept, tensors


def _restore(module: nn.Module, name: str, tensor: Tensor, restored: list[str], warnings: list[str]) -> None:
    """Recompute a rotary table, already FP32 again, whose values all fit 16 bits; warn where impossible."""
    halves = [] if tensor.is_meta else [h for h in _HALVES if torch.equal(tensor, tensor.to(h).float())]
    if not halves:
        return
    # transformers 5 names: `inv_freq`, `original_inv_freq`, with a layer type before if there are several.
    layer_type = re.sub(r"_?(original_)?inv_freq$", "", name.rpartition(".")[2])
    kind = getattr(module, "rope_type", None)
    kind = (kind.get(layer_type) if isinstance(kind, dict) else kind) or "default"
    build: Any = getattr(module, f"compute_{kind}_rope_parameters", getattr(module, "rope_init_fn", None))
    for cls in type(module).__mro__:
        build = build or getattr(sys.modules.get(cls.__module__), "ROPE_INIT_FUNCTIONS", {}).get(kind)
    try:
        with torch.device("cpu"):
            exact = build(module.config, **({"layer_type": layer_type} if layer_type else {}))[0]
        rounded = [exact.to(half).float().to(tensor.device) for half in halves]
    except (AttributeError, KeyError, TypeError, ValueError):
        exact, rounded = tensor.new_empty(0), []
    if any(torch.equal(tensor, values) for values in rounded):
        restored += [name] * (not torch.equal(tensor.cpu(), exact))
        tensor.data.copy_(exact)
    else:
        warnings.append(f"{name} looks rounded to 16 bits and could not be recomputed")


def _floating_to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        items = [_floating_to(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        entries = {key: _floating_to(item, dtype) for key, item in value.items()}
        return type(value)(**entries) if is_dataclass(value) else type(value)(entries)
    return value


# Plain functions: they pickle by name, deepcopy to themselves and are recognised in a later cast.
def _enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _floating_to(args, torch.float32), _floating_to(kwargs, torch.float32)


# Not the input's dtype: T5 itself converts the input of `wo` to FP32, which would leak into 16-bit layers.
def _leave_bfloat16(module: nn.Module, args: Any, output: Any) -> Any:
    return _floating_to(output, torch.bfloat16)


def _leave_float16(module: nn.Module, args: Any, output: Any) -> Any:
    return _floating_to(output, torch.float16)


def _callable(name: str, modules: Modules) -> list[str]:
    """`name`; for a mere container (ModuleList), whose hooks would never run, the modules in it."""
    if type(modules[name]).forward is not nn.Module.forward:
        return [name]
    return [n for child in modules[name]._modules for n in _callable(f"{name}.{child}".lstrip("."), modules)]
