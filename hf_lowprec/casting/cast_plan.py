"""The plan of a cast: which dtype every tensor gets, which hooks are installed, and why. Making it changes nothing."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hf_lowprec.casting.earlier_casts import earlier_entries, marks_in
from hf_lowprec.casting.fp32_rules import (
    Fp32Parts,
    KeepFp32,
    as_entries,
    check_entries_match,
    check_no_quantized_weights,
    check_not_rounded,
    fp32_parts,
    is_by_caller,
    modules_with_torch_losses,
)
from hf_lowprec.casting.listed_classes import (
    CLASSES_CALLED_WITH_FP32,
    CLASSES_COMPUTING_IN_FP32,
    CLASSES_PREDICTING_IN_FP32,
    CLASSES_RETURNING_FP32,
)
from hf_lowprec.casting.losses import has_loss_function
from hf_lowprec.casting.module_kinds import (
    is_code_of_a_library,
    is_code_of_transformers,
    is_loss,
    is_model,
    is_rotary,
    names_in_forward,
)
from hf_lowprec.casting.module_tree import ModelTensor, ModuleTree, output_embeddings
from hf_lowprec.casting.quantized import acts_as_fp32, frozen_tensors

HookKind = Literal[
    "upcast inputs",
    "downcast outputs",
    "upcast outputs",
    "downcast inputs",
    "loss function in FP32",
    "torch losses in FP32",
    "warn of 16-bit losses",
]
_NOT_CALLED, _NOT_NAMED = "not called in forward", "the model's own code"
"""The reasons for hooks of losses that `forward` does not name, if there are any."""


@dataclass(frozen=True)
class TensorPlan:
    """The plan for one tensor."""

    name: str
    dtype: torch.dtype  # the dtype to give it
    action: Literal["cast", "keep", "leave"]  # cast to 16 bits, keep in FP32 (or upcast), leave as it is
    reason: str
    target: ModelTensor = field(repr=False, compare=False)


@dataclass(frozen=True)
class HookPlan:
    """A hook to install."""

    module: str  # its qualified name
    kind: HookKind
    reason: str  # a text for users


@dataclass(frozen=True)
class CastPlan:
    """The plan of a cast. `str()` of it lists every tensor and hook. Names are qualified; the model itself is ""."""

    dtype: torch.dtype
    tensors: tuple[TensorPlan, ...]
    hooks: tuple[HookPlan, ...]  # in the order in which they are installed
    kept: dict[str, str]  # FP32 module (the outermost one) or single tensor -> why
    heads: tuple[str, ...]  # kept modules that end the model: their output stays in FP32
    losses: tuple[str, ...]  # loss modules, and models that compute a loss in FP32

    def hooks_of(self, kind: HookKind) -> dict[str, str]:
        """Return the modules that get a kind of hook, and why."""
        return {hook.module: hook.reason for hook in self.hooks if hook.kind == kind}

    def __str__(self) -> str:
        lines = [f"plan of a cast to {self.dtype}:"]
        lines += [f"  tensor {t.name}: {t.action} {t.dtype}".ljust(72) + f" {t.reason}" for t in self.tensors]
        lines += [f"  module {h.module or '(model)'}: {h.kind}".ljust(72) + f" {h.reason}" for h in self.hooks]
        return "\n".join(lines)


def make_plan(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep_fp32: KeepFp32 = ()) -> CastPlan:
    """Decide what `cast_model` with these arguments does. The model is not changed.

    Args:
        model: may have been cast before, in whole or in part; earlier entries of `keep_fp32` stay in effect.
        dtype: BF16 or FP16.
        keep_fp32: one new entry or several.

    Raises:
        ValueError: an entry matches nothing, covers quantized weights, or names what an earlier cast has rounded.
        TypeError: an entry is neither a string nor a module class.
    """
    tree, earlier, new = ModuleTree.of(model), earlier_entries(model), as_entries(keep_fp32)
    check_entries_match(tree, new)
    parts = fp32_parts(tree, (*earlier, *new))
    check_no_quantized_weights(tree, parts)
    if marks_in(model):
        check_not_rounded(tree, parts, fp32_parts(tree, earlier))
    tensors = tuple(_plan_tensors(tree, parts, dtype))
    kept = _kept_in_fp32(tree, parts, tensors)
    tree = tree.after({id(plan.target.tensor): plan.dtype for plan in tensors})
    heads, before_head = _output_heads(tree, parts)
    hooks = (*_hooks_around_fp32(tree, parts, kept, heads, dtype), *_hooks_of_models(tree, before_head, dtype))
    called = [hook.module for hook in hooks if hook.kind == "upcast inputs"]
    loss_modules = [name for name in called if is_loss(tree.modules[name])]
    named = [hook.module for hook in hooks if "in FP32" in hook.kind and hook.reason not in (_NOT_CALLED, _NOT_NAMED)]
    return CastPlan(
        dtype,
        tensors,
        hooks,
        kept,
        heads=tuple(name for name in called if name in heads),
        losses=(*loss_modules, *named),
    )


def _plan_tensors(tree: ModuleTree, parts: Fp32Parts, dtype: torch.dtype) -> Iterator[TensorPlan]:
    """Decide the dtype of every tensor."""
    frozen = frozen_tensors(tree.tensors)
    for target in tree.tensors:
        name, reason = target.name, parts.reason(target)
        if name in frozen:
            yield TensorPlan(name, target.tensor.dtype, "leave", frozen[name], target)
        elif reason is not None:
            yield TensorPlan(name, torch.float32, "keep", reason, target)
        else:
            yield TensorPlan(name, dtype, "cast", "no rule keeps it", target)


def _kept_in_fp32(tree: ModuleTree, parts: Fp32Parts, tensors: Iterable[TensorPlan]) -> dict[str, str]:
    """Return the outermost modules and the single tensors that stay in FP32, and why.

    A kept module without FP32 tensors is listed only if its code computes in FP32.
    """
    kept = dict[str, str]()
    for plan in tensors:
        if plan.action == "keep" or (plan.action == "leave" and acts_as_fp32(plan.target.tensor)):
            for name, owner in zip(plan.target.names, plan.target.owners, strict=True):
                outer = parts.outermost(owner)
                kept |= {name: parts.tensors[plan.name]} if outer is None else {outer: parts.modules[outer]}
    for name, reason in parts.modules.items():
        module = tree.modules[name]
        computes_in_fp32 = is_loss(module) or type(module).__name__ in CLASSES_COMPUTING_IN_FP32
        if computes_in_fp32 and parts.outermost(name) == name:
            kept[name] = reason
    return kept


def _output_heads(tree: ModuleTree, parts: Fp32Parts) -> tuple[set[str], list[str]]:
    """Find the kept modules that end the model: their outputs, the logits, stay in FP32.

    A kept module is a head if it is or contains what `get_output_embeddings()` of the model, or of a model inside,
    returns; or if `keep_fp32` keeps it and it is the last of the model's children that hold floating tensors, or the
    last child of that one, and so on. The last child is called last by convention only, so the modules before it
    downcast their inputs: a model that calls them later does not fail.

    Returns:
        The heads, and the modules written before the last one.
    """
    names = {id(module): name for name, module in tree.modules.items()}
    heads = set[str]()
    for module in (tree.modules[""], *filter(is_model, tree.modules.values())):
        name = names.get(id(output_embeddings(module)))
        if name is not None and (kept := parts.outermost(name)) is not None:
            heads |= set(tree.callable_parts(kept))
    last, written_before = "", list[str]()
    while (children := tree.computing_children(last)) and (not last or last not in parts.modules):
        *before, last = children
        written_before += [part for child in before for part in tree.callable_parts(child)]
    is_shared = sum(module is tree.modules[last] for module in tree.modules.values()) > 1
    if not last or last in heads or is_shared or not is_by_caller(parts.modules.get(last, "")):
        return heads, []
    return heads.union(tree.callable_parts(last)), written_before


def _hooks_around_fp32(
    tree: ModuleTree, parts: Fp32Parts, kept: Mapping[str, str], heads: set[str], dtype: torch.dtype
) -> Iterator[HookPlan]:
    """Yield the hooks of what is kept in FP32, and of losses, in the order of their installation.

    Kept modules get their inputs in FP32 and return 16 bits to the next module, except for heads and losses. Rotary
    embeddings convert their own outputs, except for the listed classes.
    """
    for outer, reason in kept.items():
        for name in tree.callable_parts(outer) if outer in tree.modules else ():
            module = tree.modules[name]
            if is_rotary(module) and type(module).__name__ not in CLASSES_COMPUTING_IN_FP32:
                continue
            yield HookPlan(name, "upcast inputs", reason)
            if name not in heads and not is_loss(module):
                yield HookPlan(name, "downcast outputs", reason)
    for name, module in tree.modules.items():
        cls = type(module).__name__
        if has_loss_function(module):
            calls_it = "loss_function" in names_in_forward(module)
            yield HookPlan(name, "loss function in FP32", "called in forward" if calls_it else _NOT_CALLED)
        if cls in CLASSES_RETURNING_FP32 and parts.outermost(name) is None:
            yield HookPlan(name, "downcast outputs", CLASSES_RETURNING_FP32[cls])
        for child in tree.called_children(name) if cls in CLASSES_PREDICTING_IN_FP32 else ():
            if tree.computes_in(child, dtype):
                yield HookPlan(child, "upcast outputs", CLASSES_PREDICTING_IN_FP32[cls])
    # A user's model whose `forward` names none of torch's losses may call a function, method or attribute that does.
    named = modules_with_torch_losses(tree)
    yield from (HookPlan(name, "torch losses in FP32", "named in forward") for name in named)
    of_peft: Any = getattr(tree.root, "get_base_model", None)
    model = tree.root if of_peft is None else of_peft()
    whole = next((name for name, module in tree.modules.items() if module is model), None)
    if whole is not None and whole not in named and not is_code_of_a_library(model) and not is_loss(model):
        yield HookPlan(whole, "torch losses in FP32", _NOT_NAMED)


def _hooks_of_models(tree: ModuleTree, before_head: Iterable[str], dtype: torch.dtype) -> Iterator[HookPlan]:
    """Yield the hooks that round inputs: activations of the model, of models inside, and of modules that get FP32.

    The model also warns about a 16-bit loss.
    """
    reasons = {name: _reason_for_fp32_inputs(tree, name) for name in tree.modules}
    for name, module in tree.modules.items():
        # The first parameter may be a norm's: `x.to(next(self.blocks.parameters()).dtype)`.
        if {"parameters", "dtype"} <= names_in_forward(module) and not is_code_of_transformers(module):
            for part in tree.called_children(name):
                reasons[part] = reasons[part] or "called with the dtype of some parameter"
    called_with_fp32 = {name: reason for name, reason in reasons.items() if reason}
    reasons = dict.fromkeys(before_head, "written before an output head, whose output is FP32") | called_with_fp32
    reasons = {name: reason for name, reason in reasons.items() if tree.computes_in(name, dtype)}
    yield from (HookPlan(name, "downcast inputs", reason) for name, reason in reasons.items())
    root = next((name for name in reasons if tree.modules[name] is tree.root), None)
    if root is not None:
        yield HookPlan(root, "warn of 16-bit losses", "the model")


def _reason_for_fp32_inputs(tree: ModuleTree, name: str) -> str:
    """Return the reason why a module may be called with FP32; empty if it is not."""
    module = tree.modules[name]
    if module is tree.root:
        return "the model, called with the data"
    if is_model(module):
        return "a model inside, which can be called with the data"
    parent, _, child = name.rpartition(".")
    by_child = f"{type(tree.modules[parent]).__name__}.{child}"
    return CLASSES_CALLED_WITH_FP32.get(type(module).__name__) or CLASSES_CALLED_WITH_FP32.get(by_child, "")
