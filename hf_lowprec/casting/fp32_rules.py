"""Decide what stays in FP32: by rules, by the caller's `keep_fp32`, and because it is tied to such a tensor.

A rule yields the names of modules and tensors of a `ModuleTree`, each with the reason. A module is kept with everything
below it, and gets hooks that convert its inputs and outputs. A tensor that is kept alone gets none: the code around it
has to convert its values.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from hf_lowprec.casting.listed_classes import CLASSES_COMPUTING_IN_FP32
from hf_lowprec.casting.module_kinds import (
    is_code_of_transformers,
    is_loss,
    is_norm,
    is_rotary,
    names_in_forward,
    uses_torch_losses,
)
from hf_lowprec.casting.module_tree import ModelTensor, ModuleTree, join, outermost, shape_of
from hf_lowprec.casting.quantized import acts_as_fp32, is_quantized
from hf_lowprec.rounding import LOW_PRECISION_DTYPES

Entry = str | type[nn.Module]
KeepFp32 = Entry | Iterable[Entry]
Kept = Iterator[tuple[str, str]]
"""Names of modules and tensors, and why they stay in FP32: a text for users."""

_BY_CALLER = "keep_fp32 "  # begins the reason for what a caller names
_FOURIER = re.compile(r"Fourier(Projection|Embedding|Features)$")
_MATRIX_FUNCTIONS = {"matrix_exp", "householder_product", "solve", "inv", "inverse", "slogdet", "cholesky", "qr", "svd"}
_MODEL_CLASS_ATTRIBUTES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_BIAS_OF_EXPERTS = re.compile(r"(\w+_)?(correction|experts?|balanc\w+)_bias(es)?")


@dataclass
class Fp32Parts:
    """The modules and tensors of a model that stay in FP32, each with a reason."""

    modules: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)  # by `ModelTensor.name`; those of kept modules included

    def outermost(self, name: str) -> str | None:
        """Return the outermost kept module that a module lies in, itself included; None if it is not kept."""
        return outermost(name, self.modules)

    def reason(self, target: ModelTensor) -> str | None:
        """Return why a tensor stays in FP32, alone or with its module; None if it does not."""
        module = self.outermost(target.owners[0])
        return self.tensors.get(target.name) if module is None else self.modules[module]


def fp32_parts(tree: ModuleTree, keep_fp32: Iterable[Entry]) -> Fp32Parts:
    """Decide what stays in FP32: apply every rule, then the entries of `keep_fp32`, then ties.

    If several rules keep a module, the first one gives the reason. If several keep a single tensor, the last one does,
    which is the most specific (the innermost model's class, or the caller).
    """
    kept = [row for rule in FP32_RULES for row in rule(tree)]
    kept += [row for entry in keep_fp32 for row in named_by_caller(tree, entry)]
    first_names = {name: target.name for target in tree.tensors for name in target.names}
    parts = Fp32Parts()
    for name, reason in kept:
        if name in tree.modules:
            parts.modules.setdefault(name, reason)
        else:
            parts.tensors[first_names[name]] = reason
    keep_tied_weights(tree, parts)
    return parts


def modules_by_kind(tree: ModuleTree) -> Kept:
    """Keep norms, rotary embeddings, losses and other modules by their class, or by their weights."""
    for name, module in tree.modules.items():
        if reason := _reason_by_kind(module):
            yield name, reason


def _reason_by_kind(module: nn.Module) -> str:
    cls = type(module).__name__
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and acts_as_fp32(tensor):
            return f"weights quantized as {type(tensor.data).__name__} of {tensor.dtype}"
    if cls in CLASSES_COMPUTING_IN_FP32:
        return f"{cls}: {CLASSES_COMPUTING_IN_FP32[cls]}"
    if is_norm(module):
        return f"norm ({cls})"
    if is_rotary(module):  # BF16 would round the frequencies
        return f"rotary ({cls})"
    if _FOURIER.search(cls):
        return f"Fourier features ({cls})"
    return f"loss ({cls})" if is_loss(module) else ""  # rounded to 16 bits, a loss hides small changes


def modules_with_torch_losses(tree: ModuleTree) -> list[str]:
    """Return the modules outside transformers, other than losses, whose `forward` names one of torch's losses."""
    return [
        name
        for name, module in tree.modules.items()
        if uses_torch_losses(module) and not is_code_of_transformers(module) and not is_loss(module)
    ]


def loss_weights(tree: ModuleTree) -> Kept:
    """Keep class weights: frozen vectors with "weight" in their name that a `forward` with torch's losses uses.

    These losses compute in FP32, so rounding the weights to 16 bits would gain nothing.
    """
    modules = set(modules_with_torch_losses(tree))
    for name, tensor in tree.named_tensors():
        module, _, attribute = name.rpartition(".")
        used = names_in_forward(tree.modules[module]) if module in modules else ()
        is_vector = shape_of(tensor).numel() == max(shape_of(tensor), default=0)
        is_number = tensor.is_floating_point() and not tensor.requires_grad
        # A loss in a checkpoint computes in 16 bits (`losses.py`), and torch takes no weights of another dtype in it.
        if attribute in used and "checkpoint" not in used and "weight" in attribute and is_vector and is_number:
            yield name, "weights of classes in a loss"


def biases_that_choose_experts(tree: ModuleTree) -> Kept:
    """Keep biases of routers by their names, and each buffer named bias of a module whose `forward` uses `topk`.

    A router adds this bias to its scores only to find the highest, so a rounded bias would send tokens to other
    experts. Not every model's class names it.
    """
    for name, tensor in tree.named_tensors():
        module, _, attribute = name.rpartition(".")
        is_buffer = "bias" in attribute and not isinstance(tensor, nn.Parameter)
        by_topk = is_buffer and "topk" in names_in_forward(tree.modules[module])
        untrained = "correction" in attribute or not tensor.requires_grad  # some declare corrections as parameters
        if untrained and (by_topk or _BIAS_OF_EXPERTS.fullmatch(attribute)):
            yield name, "bias that chooses experts"


def matrix_functions(tree: ModuleTree) -> Kept:
    """Keep modules without children whose `forward` names a function of matrices, or whose weight is computed by one.

    torch has none of these functions in 16 bits. Most raise an error. The matrix exponential, by which torch's
    `orthogonal` parametrization computes weights, gives NaN.
    """
    for name, module in tree.modules.items():
        functions = _MATRIX_FUNCTIONS & names_in_forward(module)
        if functions and not module._modules:
            owner = re.sub(r"\.?\bparametrizations\.\w+\.\d+$", "", name)
            kept = name if tree.modules[owner]._modules.keys() - {"parametrizations"} else owner
            yield kept, f"computes {min(functions)}, which torch lacks in 16 bits"


def named_by_model_class(tree: ModuleTree) -> Kept:
    """Keep what the class of the model, or of a model inside, names, as transformers does when it loads the model.

    A named tensor (routers, sinks) is kept alone: the model's own code converts around it.
    """
    names = [*tree.modules, *(name for name, _ in tree.named_tensors())]
    for prefix, module in tree.modules.items():
        for attribute in _MODEL_CLASS_ATTRIBUTES:
            # Not getattr: PEFT's wrappers forward it to the model inside, where names have another prefix.
            listed = vars(module).get(attribute, getattr(type(module), attribute, None))
            if not isinstance(listed, list | tuple | set | frozenset) or not listed:
                continue
            search = re.compile("|".join(sorted(listed)).replace("*", ".*")).search
            reason, start = f"named in {type(module).__name__}.{attribute}", join(prefix, "")
            yield from ((n, reason) for n in names if n.startswith(start) and search(n.removeprefix(start)))


FP32_RULES: tuple[Callable[[ModuleTree], Kept], ...] = (
    modules_by_kind,
    loss_weights,
    biases_that_choose_experts,
    matrix_functions,
    named_by_model_class,
)
"""The rules that need only the model."""


def named_by_caller(tree: ModuleTree, entry: Entry) -> Kept:
    """Keep what one entry of `keep_fp32` names: a class, or a glob for the end of a qualified name.

    A tensor is kept with the module that owns it if the module has no children, else alone.
    """
    if isinstance(entry, type):
        reason = f"{_BY_CALLER}{entry.__name__!r}"
        yield from ((name, reason) for name, module in tree.modules.items() if isinstance(module, entry))
        return
    reason = f"{_BY_CALLER}{entry!r}"
    match = re.compile(fnmatch.translate(f"*.{entry}")).match  # for names with a leading dot
    yield from ((name, reason) for name in tree.modules if name and match(f".{name}"))
    for name, _ in tree.named_tensors():
        if match(f".{name}"):
            owner = name.rpartition(".")[0]
            yield name if tree.modules[owner]._modules else owner, reason


def is_by_caller(reason: str) -> bool:
    """Return whether something stays in FP32 only because a caller names it."""
    return reason.startswith(_BY_CALLER)


def keep_tied_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Add to `parts` every tensor of a kept module, and every other leaf module that owns one of them (tied weights).

    A module computes in one dtype, so the other owner is kept as a whole, with all its tensors. These may be tied in
    turn, so this is repeated until nothing is added.
    """
    kept_before = -1
    while kept_before != len(parts.modules):
        kept_before = len(parts.modules)
        for target in tree.tensors:
            owners = dict(zip(target.names, target.owners, strict=True))
            kept_name = next((name for name, owner in owners.items() if parts.outermost(owner) is not None), None)
            if kept_name is not None:
                parts.tensors.setdefault(target.name, f"tied to {kept_name}")
            if target.name not in parts.tensors or len(set(target.owners)) == 1:
                continue
            for name, owner in owners.items():
                if not tree.modules[owner]._modules and parts.outermost(owner) is None:
                    other = kept_name or next(other for other in target.names if other != name)
                    parts.modules[owner] = f"tied to {other}"


def as_entries(keep_fp32: KeepFp32) -> tuple[Entry, ...]:
    """Return the entries of `keep_fp32`. Raise TypeError for one that is neither a name nor a module class."""
    entries = (keep_fp32,) if isinstance(keep_fp32, str | type) else tuple(keep_fp32)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"keep_fp32 takes names (str) and torch.nn.Module classes, not {entry!r}")
    return entries


def matching_entries(tree: ModuleTree, entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that name something in the model."""
    return [entry for entry in entries if any(named_by_caller(tree, entry))]


def entries_within(tree: ModuleTree, name: str, entries: Iterable[Entry]) -> list[Entry]:
    """Return entries for a cast of one module alone: those that match there, and names of what the others match."""
    found = matching_entries(ModuleTree.of(tree.modules[name]), entries)
    others = [kept for entry in entries if entry not in found for kept, _ in named_by_caller(tree, entry)]
    return [*found, *(kept.removeprefix(f"{name}.") for kept in others if kept.startswith(f"{name}."))]


def check_entries_match(tree: ModuleTree, entries: Iterable[Entry]) -> None:
    """Raise ValueError, listing similar names, for an entry that names nothing in the model."""
    for entry in entries:
        if matching_entries(tree, [entry]):
            continue
        name = entry if isinstance(entry, str) else entry.__name__
        names = {*tree.modules, *(name for name, _ in tree.named_tensors())}
        names |= {path.rpartition(".")[2] for path in names} | {type(m).__name__ for m in tree.modules.values()}
        near = difflib.get_close_matches(name.strip("*."), sorted(names), n=5, cutoff=0.4)
        raise ValueError(f"keep_fp32 {name!r} matches no module or tensor; similar names: {', '.join(near) or 'none'}")


def check_no_quantized_weights(tree: ModuleTree, parts: Fp32Parts) -> None:
    """Raise ValueError if `keep_fp32` covers a quantized weight, which has no FP32 form."""
    for target in tree.tensors:
        reason = parts.reason(target)
        if reason is not None and is_by_caller(reason) and is_quantized(target.tensor):
            raise ValueError(
                f"{reason} covers {target.name}, which is quantized and has no FP32 form; "
                "keep only modules without quantized weights"
            )


def check_not_rounded(tree: ModuleTree, parts: Fp32Parts, parts_before: Fp32Parts) -> None:
    """Raise ValueError if a tensor is to be kept that an earlier cast has rounded.

    Args:
        tree: the model.
        parts: what should stay in FP32.
        parts_before: what would stay in FP32 without the new entries of this call.
    """
    late = [t for t in tree.tensors if t.name in parts.tensors and t.name not in parts_before.tensors]
    if rounded := [target.name for target in late if target.tensor.dtype in LOW_PRECISION_DTYPES]:
        raise ValueError(
            f"keep_fp32 comes too late for {min(rounded)}: an earlier cast has rounded it; load the model again"
        )
