"""What stays in FP32, and why: norms, rotary embeddings, losses, what the model's class or the caller names."""

import difflib
import fnmatch
import re

from torch import Tensor, nn

from hf_lowprec.casting.float32_code import FLOAT32_CODE
from hf_lowprec.casting.quantized import presents_float32

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM_NAME = re.compile(r"Norm(\d+[a-z]?|Gated|PerHead|Layer)*$", re.IGNORECASE)
_ROTARY_NAME = re.compile(r"Rotary|Rope\w*Embedding", re.IGNORECASE)
_FREQUENCIES = re.compile(r"(\w+_)?inv_freq")
_LOSS_NAME = re.compile(r"(Loss|Criterion)$")

Entry = str | type[nn.Module]
Modules = dict[str, nn.Module]
Kept = tuple[dict[str, str], dict[int, str]]  # module name -> why, id of a tensor -> why
Owners = dict[int, list[tuple[str, str, Tensor]]]  # id of a tensor -> (module name, tensor name, tensor)


def kind_of(module: nn.Module) -> str:
    """`"norm"`, `"rotary"`, `"loss"` or `""`."""
    names = [cls.__name__ for cls in type(module).__mro__]
    inner = [m for m in module.modules() if m is not module and (m._parameters or m._buffers)]
    # By name alone, whole encoders (Wav2Vec2EncoderStableLayerNorm) and norms that own linears would count.
    if isinstance(module, _NORMS) or any(map(_NORM_NAME.search, names)):
        return "norm" if all(kind_of(m) == "norm" for m in inner) else ""
    # A table of frequencies has its format for its values; its module decides what it returns.
    tables = not module._parameters and any(map(_FREQUENCIES.fullmatch, module._buffers))
    if (tables or any(map(_ROTARY_NAME.search, names))) and not inner:
        return "rotary"
    # With more than numbers of its own (a temperature), it is a part of the model.
    return "loss" if any(map(_LOSS_NAME.search, names)) and not any(p.dim() for p in module.parameters()) else ""


def needs_float32(module: nn.Module) -> bool:
    """Whether it is the code of a module, with or without tensors, that works in FP32."""
    return kind_of(module) == "loss" or type(module).__name__ in FLOAT32_CODE


def is_bounded(module: nn.Module) -> bool:
    """Whether a kept module gets a boundary: a rotary embedding converts by itself, but for those known not to."""
    return kind_of(module) != "rotary" or type(module).__name__ in FLOAT32_CODE


def plan(modules: Modules, owners: Owners, new: tuple[Entry, ...], earlier: tuple[Entry, ...]) -> Kept:
    kept = {n: f"{kind} ({type(m).__name__})" for n, m in modules.items() if (kind := kind_of(m))}
    codes = {n: type(m).__name__ for n, m in modules.items() if type(m).__name__ in FLOAT32_CODE}
    kept |= {n: f"{code}: {FLOAT32_CODE[code]}" for n, code in codes.items()}
    for path, _, tensor in (owner for group in owners.values() for owner in group):
        if presents_float32(tensor):
            kept[path] = f"weights quantized as {type(tensor.data).__name__} of {tensor.dtype}"
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
            inside = next((name for path, name, _ in group if top_of(path, kept) is not None), None)
            if inside is not None:
                tensors.setdefault(key, f"tied to {inside}")
            # One module computes in one dtype: a childless owner of a tied, kept tensor is kept as a whole.
            for path, name, _ in group if key in tensors and len({path for path, *_ in group}) > 1 else ():
                if path in leaves and top_of(path, kept) is None:
                    kept[path] = f"tied to {inside or next(n for _, n, _ in group if n != name)}"
    return kept, tensors


def top_of(name: str, kept: dict[str, str]) -> str | None:
    """The outermost kept module that `name` lies in, itself included."""
    above = (".".join(name.split(".")[:i]) for i in range(name.count(".") + 2))
    return next((top for top in above if top in kept), None)


def callable_parts(name: str, modules: Modules) -> list[str]:
    """`name`; for a mere container (ModuleList), whose hooks would never run, the modules in it."""
    if type(modules[name]).forward is not nn.Module.forward:
        return [name]
    return [n for child in modules[name]._modules for n in callable_parts(f"{name}.{child}".lstrip("."), modules)]
