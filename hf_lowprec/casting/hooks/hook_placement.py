"""Decide which modules get which hooks: one function per kind of hook.

They see the dtypes that the model's tensors are planned to have.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_lowprec.casting.fp32_parts import Fp32Parts
from hf_lowprec.casting.fp32_rules import is_loss, is_rotary, modules_with_torch_losses
from hf_lowprec.casting.hooks.forward_code import is_code_of_a_library, is_code_of_transformers, names_in_forward
from hf_lowprec.casting.hooks.losses import has_loss_function
from hf_lowprec.casting.listed_classes import (
    CLASSES_CALLED_WITH_FP32,
    CLASSES_COMPUTING_IN_FP32,
    CLASSES_PREDICTING_IN_FP32,
    CLASSES_RETURNING_FP32,
)
from hf_lowprec.casting.model_parts import called_children, computing_children, is_model, output_embeddings
from hf_lowprec.casting.module_tree import ModuleTree

HookKind = Literal[
    "upcast inputs",
    "downcast outputs",
    "upcast outputs",
    "downcast inputs",
    "loss function in FP32",
    "torch losses in FP32",
    "warn of 16-bit losses",
]


NOT_CALLED, NOT_NAMED = "not called in forward", "the model's own code"
"""The reasons for hooks of losses that `forward` does not name, if there are any."""


@dataclass(frozen=True)
class HookPlan:
    """A hook that is to be installed."""

    module: str  # its qualified name
    kind: HookKind
    reason: str  # for people


@dataclass(frozen=True)
class OutputHeads:
    """The kept modules that end the model: their outputs, the logits, stay in FP32."""

    names: frozenset[str]
    written_before: tuple[str, ...]  # modules that downcast their inputs, in case one of them gets a head's output


def output_heads(tree: ModuleTree, parts: Fp32Parts, dtype: torch.dtype) -> OutputHeads:
    """Find the kept modules whose outputs stay in FP32.

    A kept module is a head if it is or contains what `get_output_embeddings()` of the model, or of a model inside,
    returns; or if `keep_fp32` keeps it and it is the last of the model's children that hold floating tensors, or the
    last child of that, and so on down. The last child written is the last one called by convention only: the modules
    written before it downcast their inputs, so that a model which calls them later does not fail.
    """
    names = {id(module): name for name, module in tree.modules.items()}
    heads = set[str]()
    for module in (tree.modules[""], *filter(is_model, tree.modules.values())):
        name = names.get(id(output_embeddings(module)))
        if name is not None and (kept := parts.outermost(name)) is not None:
            heads |= set(tree.callable_parts(kept))
    last, written_before = _last_kept_module(tree, parts)
    if last is None or last in heads or parts.modules[last].rule != "keep_fp32" or _has_several_names(tree, last):
        return OutputHeads(frozenset(heads), ())
    called_before = [part for child in written_before for part in tree.callable_parts(child)]
    return OutputHeads(
        frozenset(heads.union(tree.callable_parts(last))),
        tuple(part for part in called_before if tree.computes_in(part, dtype)),
    )


def _last_kept_module(tree: ModuleTree, parts: Fp32Parts) -> tuple[str | None, list[str]]:
    """The first kept module on the way down from last child to last child, and the children written before it."""
    name, written_before = "", list[str]()
    while children := computing_children(tree, name):
        name = children[-1]
        written_before += children[:-1]
        if name in parts.modules:
            return name, written_before
    return None, written_before


def _has_several_names(tree: ModuleTree, name: str) -> bool:
    """Return whether a module is shared, and so called in several places."""
    return sum(module is tree.modules[name] for module in tree.modules.values()) > 1


def kept_modules_with_hooks(tree: ModuleTree, kept: Iterable[str]) -> list[str]:
    """The modules that get the hooks of kept modules.

    Containers are never called: the modules in them get the hooks. Rotary embeddings convert their own outputs, except
    for the listed classes.
    """
    called = [part for name in kept if name in tree.modules for part in tree.callable_parts(name)]
    return [
        name
        for name in called
        if not is_rotary(tree.modules[name]) or type(tree.modules[name]).__name__ in CLASSES_COMPUTING_IN_FP32
    ]


def kept_module_hooks(
    tree: ModuleTree, parts: Fp32Parts, names: Iterable[str], heads: OutputHeads
) -> Iterator[HookPlan]:
    """Kept modules get their inputs in FP32 and return 16 bits to the next module, except for heads and losses."""
    for name in names:
        kept = parts.outermost(name)
        reason = "" if kept is None else parts.modules[kept].text
        yield HookPlan(name, "upcast inputs", reason)
        if name not in heads.names and not is_loss(tree.modules[name]):
            yield HookPlan(name, "downcast outputs", reason)


def loss_function_hooks(tree: ModuleTree) -> Iterator[HookPlan]:
    """Models with a `loss_function`, as transformers has it, compute it in FP32."""
    for name, module in tree.modules.items():
        if has_loss_function(module):
            calls_it = "loss_function" in names_in_forward(module)
            yield HookPlan(name, "loss function in FP32", "called in forward" if calls_it else NOT_CALLED)


def fp32_result_hooks(tree: ModuleTree, parts: Fp32Parts) -> Iterator[HookPlan]:
    """Classes that compute in FP32 with 16-bit tensors return 16 bits to the next module."""
    for name, module in tree.modules.items():
        reason = CLASSES_RETURNING_FP32.get(type(module).__name__)
        if reason and parts.outermost(name) is None:
            yield HookPlan(name, "downcast outputs", reason)


def fp32_prediction_hooks(tree: ModuleTree, dtype: torch.dtype) -> Iterator[HookPlan]:
    """Children of classes that compute with their results in FP32 return FP32 copies."""
    for name, module in tree.modules.items():
        if reason := CLASSES_PREDICTING_IN_FP32.get(type(module).__name__):
            for part in called_children(tree, name):
                if tree.computes_in(part, dtype):
                    yield HookPlan(part, "upcast outputs", reason)


def torch_loss_hooks(tree: ModuleTree) -> Iterator[HookPlan]:
    """Modules of users whose `forward` computes torch's losses do so in FP32.

    So does a user's model whose `forward` names none: it may call a function, a method or an attribute that does.
    """
    named = modules_with_torch_losses(tree)
    for name in named:
        yield HookPlan(name, "torch losses in FP32", "named in forward")
    of_peft: Any = getattr(tree.root, "get_base_model", None)
    model = tree.root if of_peft is None else of_peft()
    whole = next((name for name, module in tree.modules.items() if module is model), None)
    if whole is not None and whole not in named and not is_code_of_a_library(model) and not is_loss(model):
        yield HookPlan(whole, "torch losses in FP32", NOT_NAMED)


def downcast_input_hooks(tree: ModuleTree, heads: OutputHeads, dtype: torch.dtype) -> Iterator[HookPlan]:
    """The model, the models inside it and modules that are given FP32 round the activations among their inputs."""
    reasons = {name: _reason_for_fp32_inputs(tree, name) for name in tree.modules}
    for name, module in tree.modules.items():
        # A norm's dtype, if that has the first parameter: `x.to(next(self.blocks.parameters()).dtype)`.
        if {"parameters", "dtype"} <= names_in_forward(module) and not is_code_of_transformers(module):
            for part in called_children(tree, name):
                reasons[part] = reasons[part] or "called with the dtype of some parameter"
    reasons = {name: why for name, why in reasons.items() if why and tree.computes_in(name, dtype)}
    before_head = dict.fromkeys(heads.written_before, "written before an output head, whose output is FP32")
    for name, reason in (before_head | reasons).items():
        yield HookPlan(name, "downcast inputs", reason)


def _reason_for_fp32_inputs(tree: ModuleTree, name: str) -> str:
    """The reason why a module may be called with FP32; empty if it is not."""
    module = tree.modules[name]
    if module is tree.root:
        return "the model, called with the data"
    if is_model(module):
        return "a model inside, which can be called with the data"
    parent, _, child = name.rpartition(".")
    by_child = f"{type(tree.modules[parent]).__name__}.{child}"
    return CLASSES_CALLED_WITH_FP32.get(type(module).__name__) or CLASSES_CALLED_WITH_FP32.get(by_child, "")


def loss_warning_hooks(tree: ModuleTree, downcasting: Iterable[str]) -> Iterator[HookPlan]:
    """The model warns of a 16-bit loss, if it is one of `downcasting`, the modules that downcast their inputs."""
    root = next((name for name in downcasting if tree.modules[name] is tree.root), None)
    if root is not None:
        yield HookPlan(root, "warn of 16-bit losses", "the model")
