"""Warnings that follow from measurements, each a sentence with its remedy.

A share counts as lost if it is above one half by three standard errors. Rounding that is unbiased loses nothing on
average, so it would have to be off by 0.5 plus three standard errors of chance. Rounding to nearest that still works
(updates of a spacing or more) loses a few percent; where updates are below half a spacing it loses nearly all. Few runs
are between the two, and they lose at least half of what they were meant to learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_lowprec.casting import make_plan
from hf_lowprec.monitor.findings_catalogue import FAULTS, Finding
from hf_lowprec.monitor.step_precision import ALL, COLUMN, StepPrecision
from hf_lowprec.monitor.watched_parameters import GradientRecord
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release.release import gradient_release_of
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, recommended_mode
from hf_lowprec.tensor_names import listed, parameter_kinds

LOST = 0.5
"""The share from which on something counts as lost, see above."""
STANDARD_ERRORS = 3
FEW = 0.2
"""The share of changed weights below which updates count as lost if they are not known. Where rounding to nearest loses
half of them, about a quarter of the weights change, with Adam as with SGD."""
FULL_GRADIENTS = ("attention", "mlp", "adapters", "other")
"""Kinds of parameters whose elements have gradients of about one size, unlike embeddings and heads with rare words."""
ENOUGH_MEASUREMENTS = 3
"""Measured steps without a gradient after which a tensor is said to have none. The first is not enough: `lora_A` has a
gradient of zero until `lora_B` has moved, and a router may send nothing to an expert."""


@dataclass(frozen=True)
class Evidence:
    """The measurements and facts from which findings are derived.

    Attributes:
        optimizer: the optimizer.
        precision: the last measurement.
        steps: how many steps the optimizer had taken then, since training began.
        dtypes: the dtypes of the optimizer's parameters.
        gradients: which parameters have had gradients in the measured steps.
        uncast_matrices: see `uncast_matrices`.
    """

    optimizer: torch.optim.Optimizer
    precision: StepPrecision
    steps: int
    dtypes: Sequence[torch.dtype]
    gradients: GradientRecord
    uncast_matrices: Sequence[str] = ()


def find(evidence: Evidence) -> list[Finding]:
    """Apply every rule."""
    found = (rule(evidence) for rule in RULES)
    return [finding for finding in found if finding is not None]


def is_lost(numbers: dict[str, float], name: str, more_than: float = LOST) -> bool:
    """Return whether a share is above `more_than` by three standard errors."""
    return numbers.get(name, 0.0) - STANDARD_ERRORS * numbers.get(f"{name}_error", 0.0) > more_than


def _not_finite(evidence: Evidence) -> Finding | None:
    precision = evidence.precision
    finite = precision.sums[:, [COLUMN["update_square"], COLUMN["weight_square"]]].isfinite().all(1).tolist()
    names = [name for name, is_finite in zip(precision.names, finite, strict=True) if not is_finite]
    if not names:
        return None
    remedy = FAULTS["not_finite"].remedy
    if getattr(evidence.optimizer, "skip_nonfinite", None) is False and gradient_release_of(evidence.optimizer) is None:
        remedy += "; skip_nonfinite=True skips such steps"
    shown = f"{listed(names)} or their updates, in step {precision.step} ({_describe(evidence)})"
    return Finding.of("not_finite", f"{shown}. They stay so, and Trainer logs losses that are NaN as 0", names, remedy)


def _updates_lost(evidence: Evidence) -> Finding | None:
    by_kind, step = evidence.precision.by_kind, evidence.precision.step
    changed = [
        numbers["changed"]
        for kind, numbers in by_kind.items()
        if kind in FULL_GRADIENTS and "changed" in numbers and _updates_are_lost(evidence, numbers)
    ]
    if changed:
        shown = f"only {min(changed):.1%} of the 16-bit weights changed in step {step} ({_describe(evidence)})"
        return Finding.of("updates_lost", shown, remedy=_remedy(evidence))
    lost = {
        kind: numbers["lost_updates"]
        for kind, numbers in by_kind.items()
        if kind != "norms" and is_lost(numbers, "lost_updates")
    }
    if ALL in lost:
        shown = f"{lost[ALL]:.0%} of those of step {step} ({_describe(evidence)})"
        return Finding.of("updates_lost", shown, remedy=_remedy(evidence))
    if lost:
        of_kinds = f"{max(lost.values()):.0%} of those of {_joined(list(lost))} weights"
        shown = f"{of_kinds} of step {step} ({_describe(evidence)})"
        return Finding.of("updates_lost", shown, _tensors_of(evidence, lost), _remedy(evidence))
    return None


def _updates_are_lost(evidence: Evidence, numbers: dict[str, float]) -> bool:
    """Return whether the weights with these numbers lose most of their updates."""
    if "changed" not in numbers:
        return is_lost(numbers, "lost_updates")
    rate_is_zero = evidence.precision.learning_rate == 0  # as in the first step of a warm-up
    return numbers["changed"] < FEW and not rate_is_zero and _rounds_to_nearest(evidence, numbers)


def _rounds_to_nearest(evidence: Evidence, numbers: dict[str, float]) -> bool:
    """Return whether an optimizer of another library rounds to nearest. Those of torch and transformers do.

    If few weights change in a step, rounding to nearest changes the same ones again and again. Stochastic rounding and
    compensations get to the others in time.
    """
    if type(evidence.optimizer).__module__.partition(".")[0] in ("torch", "transformers"):
        return True
    by_chance = 1 - math.exp(-evidence.steps * numbers["changed"])
    return 1 - numbers["never_moved"] < FEW * by_chance


def _second_moment_frozen(evidence: Evidence) -> Finding | None:
    numbers = evidence.precision.by_kind[ALL]
    if not is_lost(numbers, "lost_second_moment"):
        return None
    shown = f"{min(numbers['lost_second_moment'], 1):.0%} of its decay is lost in rounding ({_describe(evidence)})"
    if any(group["state_rounding"] == "nearest" for group in evidence.optimizer.param_groups):
        remedy = "Remove state_rounding='nearest', or set state_dtype=torch.float32 for it"
    else:  # rounded stochastically, only codes of 8 bits cannot decay
        shown += ". In 8 bits, it stays too large beside gradients about a million times larger in the same row"
        remedy = "Set state_dtype=exp_avg:int8|exp_avg_sq:bfloat16, also to resume"
    return Finding.of("second_moment_frozen", shown, remedy=remedy)


def _weight_decay_lost(evidence: Evidence) -> Finding | None:
    numbers = evidence.precision.by_kind[ALL]
    if not is_lost(numbers, "lost_weight_decay"):
        return None
    decay = max(float(group.get("weight_decay") or 0.0) for group in evidence.optimizer.param_groups)
    shown = f"{numbers['lost_weight_decay']:.0%} of it ({_describe(evidence)}, weight_decay={decay:g})"
    return Finding.of("weight_decay_lost", shown, remedy=_remedy(evidence))


def _norms_never_moved(evidence: Evidence) -> Finding | None:
    precision = evidence.precision
    narrow = [dtype in LOW_PRECISION_DTYPES for dtype in evidence.dtypes]
    rows = [row for row, kind in enumerate(precision.kinds) if kind == "norms" and narrow[row]]
    numbers = precision.values_of(rows) if rows else {}
    if not _updates_are_lost(evidence, numbers) or numbers["never_moved"] <= LOST:
        return None
    names = [precision.names[row] for row in rows]
    shown = f"{numbers['never_moved']:.0%} of the 16-bit norm weights are what they were when training began"
    return Finding.of("norms_never_moved", f"{shown} ({listed(names)}; {_describe(evidence)})", names)


def _not_trained(evidence: Evidence) -> Finding | None:
    gradients = evidence.gradients
    if gradients.steps < ENOUGH_MEASUREMENTS:
        return None
    if gradients.zero() and not any(gradients.nonzero):
        return Finding.of(
            "not_trained",
            f"all gradients were exactly zero in each of {gradients.steps} measured steps, so the loss is constant",
            remedy="Look for rewards that are all the same, which in GRPO give advantages of zero, or for a loss that "
            "is multiplied by zero",
        )
    no_gradient = f"had no gradient in any of {gradients.steps} measured steps"
    detached = "Look for detach() or torch.no_grad() around what is computed from them"
    frozen = "if they are not meant to be trained, set requires_grad=False"
    reasons = (
        (
            gradients.zero(),
            f"had a gradient of zeros in all of {gradients.steps} measured steps",
            f"Look for outputs that are masked or multiplied by zero; {frozen}",
        ),
        (
            gradients.replaced(),
            f"{no_gradient} and are not in the model",
            "Build the optimizer after what replaces parameters, such as model.resize_token_embeddings",
        ),
        (
            gradients.cut_off(),
            f"{no_gradient}, although the same weights of later layers had one",
            f"{detached}; {frozen}",
        ),
        (
            gradients.most_of_all(),
            f"{no_gradient} and are more than half of all weights",
            f"{detached}; {frozen}",
        ),
        (
            gradients.left_out_of_optimizer(),
            "have gradients but are not among the optimizer's parameters",
            f"Pass them to the optimizer; {frozen}",
        ),
    )
    for names, reason, remedy in reasons:
        if names:
            return Finding.of("not_trained", f"{listed(names)} {reason}", names, remedy)
    return None


def _left_in_fp32(evidence: Evidence) -> Finding | None:
    names = evidence.uncast_matrices
    shown = f"{listed(names)}, probably added after the cast, since none of its rules keeps them there"
    return Finding.of("left_in_fp32", shown, names) if names else None


RULES = (
    *(_not_finite, _updates_lost, _second_moment_frozen, _weight_decay_lost),
    *(_norms_never_moved, _not_trained, _left_in_fp32),
)


def _describe(evidence: Evidence) -> str:
    """The optimizer, its rounding, and the largest learning rate of the measured step."""
    optimizer, rate = evidence.optimizer, evidence.precision.learning_rate
    library = type(optimizer).__module__.partition(".")[0]
    text = f"{'torch.optim' if library == 'torch' else library}.{type(optimizer).__name__}"
    if isinstance(optimizer, LowPrecisionOptimizer):
        text += f", rounding={_joined(sorted({repr(group['rounding']) for group in optimizer.param_groups}))}"
    return text if rate is None else f"{text}, learning rate {rate:g}"


def _remedy(evidence: Evidence) -> str:
    """The remedy for lost updates. In all modes but nearest, only updates that FP32 weights lose as well are lost."""
    optimizer = evidence.optimizer
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return f"Use {_ours(evidence)}, which stores all of them"
    modes = [MODES[group["rounding"]] for group in optimizer.param_groups]
    if any(mode.name == "nearest" for mode in modes):
        return f"Use rounding={recommended_mode(evidence.dtypes)!r}, which stores all of them"
    if any(
        mode.has_compensation and group["state_rounding"] == "nearest"
        for mode, group in zip(modes, optimizer.param_groups, strict=True)
    ):
        return "Remove state_rounding='nearest', with which the compensation loses them"
    return "They are too small for FP32 weights as well: raise the learning rate"


def _ours(evidence: Evidence) -> str:
    """The algorithm of this package to use in place of an optimizer."""
    name, mode = type(evidence.optimizer).__name__, recommended_mode(evidence.dtypes)
    optim = f"{name.lower()}_bf16_{mode}"
    if optim not in OPTIMIZER_NAMES:
        name, optim = "AdamW", f"adamw_bf16_{mode}"
    return f"optim='{optim}' or hf_lowprec.{name} with rounding={mode!r}"


def _tensors_of(evidence: Evidence, kinds: Iterable[str]) -> list[str]:
    precision = evidence.precision
    return [name for name, kind in zip(precision.names, precision.kinds, strict=True) if kind in set(kinds)]


def _joined(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


_KEPT_BY_PEFT = "modules_to_save"


def uncast_matrices(model: nn.Module) -> list[str]:
    """The names of trained FP32 matrices that `cast_model` would cast, if the other trained matrices are 16-bit.

    Adapters, and the trained copies of modules that PEFT makes, are FP32 on purpose. Entries of `keep_fp32` of earlier
    casts are respected.
    """
    shapes = {name: full_shape(param) for name, param in model.named_parameters()}
    kinds = parameter_kinds(shapes)
    matrices = {name: p for name, p in model.named_parameters() if p.requires_grad and len(shapes[name]) >= 2}
    narrow = [param for param in matrices.values() if param.dtype in LOW_PRECISION_DTYPES]
    wide = {
        name
        for name, param in matrices.items()
        if param.dtype.itemsize > 2 and kinds[name] not in ("norms", "adapters") and _KEPT_BY_PEFT not in name
    }
    if not wide or len(wide) >= len(narrow):
        return []
    plan = make_plan(model, narrow[0].dtype)
    return [tensor.name for tensor in plan.tensors if tensor.action == "cast" and tensor.name in wide]
