"""The plan of a cast: which dtype every tensor gets, which hooks are installed, and why. Making it changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from hf_lowprec.casting.earlier_casts import earlier_entries, marks_in
from hf_lowprec.casting.fp32_parts import Fp32Parts, keep_tied_weights
from hf_lowprec.casting.fp32_rules import FP32_RULES, is_loss
from hf_lowprec.casting.hooks.hook_placement import (
    NOT_CALLED,
    NOT_NAMED,
    HookKind,
    HookPlan,
    OutputHeads,
    downcast_input_hooks,
    fp32_prediction_hooks,
    fp32_result_hooks,
    kept_module_hooks,
    kept_modules_with_hooks,
    loss_function_hooks,
    loss_warning_hooks,
    output_heads,
    torch_loss_hooks,
)
from hf_lowprec.casting.keep_fp32_entries import (
    Entry,
    KeepFp32,
    as_entries,
    check_entries_match,
    check_no_quantized_weights,
    check_not_rounded,
    named_by_caller,
)
from hf_lowprec.casting.listed_classes import CLASSES_COMPUTING_IN_FP32
from hf_lowprec.casting.module_tree import ModelTensor, ModuleTree
from hf_lowprec.casting.quantized import acts_as_fp32, frozen_tensors


@dataclass(frozen=True)
class TensorPlan:
    """The plan for one tensor."""

    name: str
    dtype: torch.dtype  # the dtype it is to have
    action: Literal["cast", "keep", "leave"]  # cast to 16 bits, keep in FP32 (or upcast), leave as it is
    reason: str
    target: ModelTensor = field(repr=False, compare=False)


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
        """The modules that get a kind of hook, and why."""
        return {hook.module: hook.reason for hook in self.hooks if hook.kind == kind}

    def __str__(self) -> str:
        lines = [f"plan of a cast to {self.dtype}:"]
        lines += [f"  tensor {t.name}: {t.action} {t.dtype}".ljust(72) + f" {t.reason}" for t in self.tensors]
        lines += [f"  module {h.module or '(model)'}: {h.kind}".ljust(72) + f" {h.reason}" for h in self.hooks]
        return "\n".join(lines)


def make_plan(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep_fp32: KeepFp32 = ()) -> CastPlan:
    """Decide what `cast_model` with these arguments does. The model is not changed.

    Args:
        model: may have been cast before, in whole or in part: entries of `keep_fp32` from then hold on.
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

    tensors = plan_tensors(tree, parts, dtype)
    kept = kept_in_fp32(tree, parts, tensors)

    tree = tree.after({id(plan.target.tensor): plan.dtype for plan in tensors})
    hooked = kept_modules_with_hooks(tree, kept)
    heads = output_heads(tree, parts, dtype)
    loss_modules = [name for name in hooked if is_loss(tree.modules[name])]
    hooks = plan_hooks(tree, parts, hooked, heads, dtype)
    named = [hook.module for hook in hooks if "in FP32" in hook.kind and hook.reason not in (NOT_CALLED, NOT_NAMED)]
    return CastPlan(
        dtype,
        tensors,
        hooks=hooks,
        kept=kept,
        heads=tuple(name for name in hooked if name in heads.names),
        losses=(*loss_modules, *named),
    )


def fp32_parts(tree: ModuleTree, keep_fp32: Iterable[Entry]) -> Fp32Parts:
    """Apply every rule, then the entries of `keep_fp32`, and ties: what stays in FP32."""
    decisions = [rule(tree) for rule in FP32_RULES]
    decisions += [named_by_caller(tree, entry) for entry in keep_fp32]
    parts = Fp32Parts.combine(decisions)
    keep_tied_weights(tree, parts)
    return parts


def plan_tensors(tree: ModuleTree, parts: Fp32Parts, dtype: torch.dtype) -> tuple[TensorPlan, ...]:
    """Decide the dtype of every tensor."""
    frozen = frozen_tensors(tree.tensors)
    plans = []
    for target in tree.tensors:
        name = target.name
        if name in frozen:
            plans.append(TensorPlan(name, target.tensor.dtype, "leave", frozen[name], target))
        elif name in parts.tensors:
            module = parts.outermost(target.owners[0].module)
            reason = parts.tensors[name] if module is None else parts.modules[module]
            plans.append(TensorPlan(name, torch.float32, "keep", reason.text, target))
        else:
            plans.append(TensorPlan(name, dtype, "cast", "no rule keeps it", target))
    return tuple(plans)


def plan_hooks(
    tree: ModuleTree, parts: Fp32Parts, hooked: Iterable[str], heads: OutputHeads, dtype: torch.dtype
) -> tuple[HookPlan, ...]:
    """Decide which hooks go on which modules, in the order in which they are to be installed.

    Args:
        tree: the model with its planned dtypes.
        parts: what stays in FP32.
        hooked: the kept modules that get hooks.
        heads: the kept modules that end the model.
        dtype: the 16-bit dtype.
    """
    input_hooks = list(downcast_input_hooks(tree, heads, dtype))
    return (
        *kept_module_hooks(tree, parts, hooked, heads),
        *loss_function_hooks(tree),
        *fp32_result_hooks(tree, parts),
        *fp32_prediction_hooks(tree, dtype),
        *torch_loss_hooks(tree),
        *input_hooks,
        *loss_warning_hooks(tree, [hook.module for hook in input_hooks]),
    )


def kept_in_fp32(tree: ModuleTree, parts: Fp32Parts, tensors: Iterable[TensorPlan]) -> dict[str, str]:
    """The outermost modules and the single tensors that stay in FP32, and why.

    A kept module without FP32 tensors is listed only if its code computes in FP32.
    """
    kept = {}
    for plan in tensors:
        if plan.action == "keep" or (plan.action == "leave" and acts_as_fp32(plan.target.tensor)):
            for owner in plan.target.owners:
                module = parts.outermost(owner.module)
                if module is None:
                    kept[owner.name] = parts.tensors[plan.name].text
                else:
                    kept[module] = parts.modules[module].text
    for name, reason in parts.modules.items():
        if parts.outermost(name) == name and _computes_in_fp32(tree.modules[name]):
            kept[name] = reason.text
    return kept


def _computes_in_fp32(module: nn.Module) -> bool:
    return is_loss(module) or type(module).__name__ in CLASSES_COMPUTING_IN_FP32
