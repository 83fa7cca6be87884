"""Modules and tensors that the caller names in `keep_fp32` stay in FP32."""

import difflib
import fnmatch
import re
from collections.abc import Iterable

from torch import nn

from hf_lowprec.casting.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.casting.quantized import is_quantized
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

Entry = str | type[nn.Module]
KeepFp32 = Entry | Iterable[Entry]


def named_by_caller(tree: ModuleTree, entry: Entry) -> Fp32Parts:
    """Keep what one entry of `keep_fp32` names: a class, or a glob for the end of a qualified name.

    A tensor is kept with the module that owns it if that has no children, else alone.
    """
    if isinstance(entry, type):
        reason = Reason("keep_fp32", f"keep_fp32 {entry.__name__!r}")
        return Fp32Parts({name: reason for name, module in tree.modules.items() if isinstance(module, entry)})
    reason = Reason("keep_fp32", f"keep_fp32 {entry!r}")
    match = re.compile(fnmatch.translate(f"*.{entry}")).match  # of a name with a dot before it
    parts = Fp32Parts({name: reason for name in tree.modules if name and match(f".{name}")})
    for tensor in tree.tensors:
        for owner in tensor.owners:
            if not match(f".{owner.name}"):
                continue
            if tree.modules[owner.module]._modules:
                parts.tensors[tensor.name] = reason
            else:
                parts.modules[owner.module] = reason
    return parts


def as_entries(keep_fp32: KeepFp32) -> tuple[Entry, ...]:
    """Return the entries of `keep_fp32`. Raise TypeError for one that is neither a name nor a module class."""
    entries = (keep_fp32,) if isinstance(keep_fp32, str | type) else tuple(keep_fp32)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"keep_fp32 takes names (str) and torch.nn.Module classes, not {entry!r}")
    return entries


def matching_entries(tree: ModuleTree, entries: Iterable[Entry]) -> list[Entry]:
    """The entries that name something in the model."""
    return [entry for entry in entries if (parts := named_by_caller(tree, entry)).modules or parts.tensors]


def entries_within(tree: ModuleTree, name: str, entries: Iterable[Entry]) -> list[Entry]:
    """The entries for a cast of one module alone: those that match there, and what the others name there."""
    found = matching_entries(ModuleTree.of(tree.modules[name]), entries)
    others = Fp32Parts.combine(named_by_caller(tree, entry) for entry in entries if entry not in found)
    below = (inside for inside in (*others.modules, *others.tensors) if inside.startswith(f"{name}."))
    return [*found, *(inside.removeprefix(f"{name}.") for inside in below)]


def check_entries_match(tree: ModuleTree, entries: Iterable[Entry]) -> None:
    """Raise ValueError, listing similar names, for an entry that names nothing in the model."""
    for entry in entries:
        if matching_entries(tree, [entry]):
            continue
        name = entry if isinstance(entry, str) else entry.__name__
        names = {*tree.modules, *(owner.name for tensor in tree.tensors for owner in tensor.owners)}
        names |= {path.rpartition(".")[2] for path in names} | {type(m).__name__ for m in tree.modules.values()}
        near = difflib.get_close_matches(name.strip("*."), sorted(names), n=5, cutoff=0.4)
        raise ValueError(f"keep_fp32 {name!r} matches no module or tensor; similar names: {', '.join(near) or 'none'}")


def check_no_quantized_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Raise ValueError if `keep_fp32` covers a quantized weight, which has no FP32 form."""
    for tensor in tree.tensors:
        if tensor.name not in parts.tensors or not is_quantized(tensor.tensor):
            continue
        module = parts.outermost(tensor.owners[0].module)
        reason = parts.tensors[tensor.name] if module is None else parts.modules[module]
        if reason.rule == "keep_fp32":
            raise ValueError(
                f"{reason.text} covers {tensor.name}, which is quantized and has no FP32 form; "
                "keep only modules without quantized weights"
            )


def check_not_rounded(tree: ModuleTree, parts: Fp32Parts, parts_before: Fp32Parts) -> None:
    """Raise ValueError if a tensor is to be kept that an earlier cast has rounded.

    Args:
        tree: the model.
        parts: what is to stay in FP32.
        parts_before: what would stay in FP32 without the new entries of this call.
    """
    late = [t for t in tree.tensors if t.name in parts.tensors and t.name not in parts_before.tensors]
    if rounded := [tensor.name for tensor in late if tensor.tensor.dtype in LOW_PRECISION_DTYPES]:
        raise ValueError(f"keep_fp32 comes too late for {min(rounded)}: an earlier cast has rounded it")
