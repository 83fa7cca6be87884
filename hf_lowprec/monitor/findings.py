"""Warnings that follow from measurements, each a sentence with its remedy.

A share counts as lost if it is above one half by three standard errors. Rounding that is unbiased loses nothing on
average, so it would have to be off by 0.5 plus three standard errors of chance. Rounding to nearest that still works
(updates of a spacing or more) loses a few percent; where updates are below half a spacing it loses nearly all. Few runs
are between the two, and they lose at least half of what they were meant to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hf_lowprec.monitor.finding import Finding
from hf_lowprec.monitor.missing_gradients import GradientRecord
from hf_lowprec.monitor.step_precision import ALL, StepPrecision
from hf_lowprec.monitor.step_statistics import COLUMN
from hf_lowprec.monitor.tensor_names import listed
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradient_release.release import gradient_release_of
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, recommended_mode

LOST = 0.5
"""The share from which on something counts as lost, see above."""
STANDARD_ERRORS = 3
FEW = 0.05
"""The share of changed weights below which updates vanish if nothing else is known of them. Where updates are a spacing
or more, nearly all weights change, except embeddings of words that are not in the batch."""
ENOUGH_MEASUREMENTS = 3
"""Measured steps without a gradient after which a tensor is said to have none. The first is not enough: `lora_A` has a
gradient of zero until `lora_B` has moved, and a router may send nothing to an expert."""


@dataclass(frozen=True)
class Evidence:
    """The measurements and facts from which findings are derived.

    Attributes:
        optimizer: the optimizer.
        precision: the last measurement.
        dtypes: the dtypes of the optimizer's parameters.
        gradients: which parameters have had gradients in the measured steps.
        uncast_matrices: see `uncast_matrices`.
    """

    optimizer: torch.optim.Optimizer
    precision: StepPrecision
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
    names = tuple(name for name, is_finite in zip(precision.names, finite, strict=True) if not is_finite)
    if not names:
        return None
    remedy = "Find the batch or the layer that begins it, and resume from an earlier checkpoint"
    if getattr(evidence.optimizer, "skip_nonfinite", None) is False and gradient_release_of(evidence.optimizer) is None:
        remedy += "; skip_nonfinite=True skips such steps"
    return Finding(
        "not_finite",
        f"updates or weights of {listed(names)} are NaN or infinite in step {precision.step} ({_describe(evidence)}): "
        f"a gradient was not finite. They remain so, and Trainer logs such losses as 0. {remedy}",
        names,
    )


def _updates_vanish(evidence: Evidence) -> Finding | None:
    by_kind = evidence.precision.by_kind
    where = [kind for kind, numbers in by_kind.items() if kind != "norms" and is_lost(numbers, "lost_updates")]
    if not where:
        return _few_weights_change(evidence)
    kinds = [ALL] if ALL in where else where
    share = max(by_kind[kind]["lost_updates"] for kind in kinds)
    subject = "the weight updates" if ALL in where else f"the updates of {_joined(where)} weights"
    tensors = () if ALL in where else tuple(_tensors_of(evidence, where))
    return Finding(
        "updates_vanish",
        f"{share:.0%} of {subject} of step {evidence.precision.step} were lost in rounding "
        f"({_describe(evidence)}): they are too small for 16-bit weights. {_remedy(evidence)}",
        tensors,
    )


def _few_weights_change(evidence: Evidence) -> Finding | None:
    """For optimizers whose updates are not known, and that are known to round to nearest."""
    optimizer, by_kind = evidence.optimizer, evidence.precision.by_kind
    # The first step of a warm-up, or gradients that were zero in every measured step.
    if evidence.precision.learning_rate == 0 or not any(evidence.gradients.nonzero):
        return None
    changed = [by_kind[kind].get("changed", 1.0) for kind in ("attention", "mlp", "other") if kind in by_kind]
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "transformers") or min(changed, default=1) > FEW:
        return None
    return Finding(
        "updates_vanish",
        f"only {min(changed):.1%} of the 16-bit weights changed in step {evidence.precision.step} "
        f"({_describe(evidence)}): the other updates were lost in rounding. {_remedy(evidence)}",
    )


def _second_moment_frozen(evidence: Evidence) -> Finding | None:
    numbers = evidence.precision.by_kind[ALL]
    if not is_lost(numbers, "lost_second_moment"):
        return None
    optimizer = evidence.optimizer
    reason = (
        "16-bit states rounded to nearest cannot decay by a factor so close to 1, so steps stay too short after large "
        "gradients"
    )
    if not isinstance(optimizer, LowPrecisionOptimizer):
        remedy = f"Use {_ours(evidence)}, which rounds states stochastically, or keep its states in FP32"
    elif any(group["state_rounding"] == "nearest" for group in optimizer.param_groups):
        remedy = "Remove state_rounding='nearest', or set state_dtype=torch.float32 for it"
    else:  # rounded stochastically, only codes of 8 bits cannot decay
        reason = (
            "gradients that stay about a million times larger than those of their neighbours in a row keep the second "
            "moments of these, in 8 bits, too large, so their steps are too short"
        )
        remedy = "Set state_dtype=exp_avg:int8|exp_avg_sq:bfloat16, also to resume"
    return Finding(
        "second_moment_frozen",
        f"{min(numbers['lost_second_moment'], 1):.0%} of the decay of the second moment is lost in rounding "
        f"({_describe(evidence)}): {reason}. {remedy}",
    )


def _weight_decay_lost(evidence: Evidence) -> Finding | None:
    numbers = evidence.precision.by_kind[ALL]
    if not is_lost(numbers, "lost_weight_decay"):
        return None
    optimizer = evidence.optimizer
    decay = max(float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups)
    return Finding(
        "weight_decay_lost",
        f"{numbers['lost_weight_decay']:.0%} of the weight decay does not arrive in the weights "
        f"({_describe(evidence)}, weight_decay={decay:g}): a step shrinks a weight by less than its 16-bit dtype can "
        f"represent. {_remedy(evidence)}",
    )


def _norms_stand_still(evidence: Evidence) -> Finding | None:
    precision = evidence.precision
    narrow = [dtype in LOW_PRECISION_DTYPES for dtype in evidence.dtypes]
    rows = [row for row, kind in enumerate(precision.kinds) if kind == "norms" and narrow[row]]
    numbers = precision.values_of(rows) if rows else {}
    if not is_lost(numbers, "lost_updates") or numbers["never_moved"] <= LOST:
        return None
    names = tuple(precision.names[row] for row in rows)
    return Finding(
        "norms_stand_still",
        f"{numbers['never_moved']:.0%} of the 16-bit norm weights are what they were when training began "
        f"({listed(names)}; {_describe(evidence)}): they are near 1, where a 16-bit weight moves by "
        "thousandths or not at all. Cast the model with hf_lowprec.cast_model, which keeps norms in FP32",
        names,
    )


def _never_stepped(evidence: Evidence) -> Finding | None:
    gradients = evidence.gradients
    if gradients.steps < ENOUGH_MEASUREMENTS:
        return None
    if gradients.zero() and not any(gradients.nonzero):
        return Finding(
            "never_stepped",
            f"all gradients were exactly zero in each of {gradients.steps} measured steps, so nothing is learned: the "
            "loss is constant. Look for rewards that are all the same, which in GRPO give advantages of zero, or for a "
            "loss that is multiplied by zero",
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
            return Finding(
                "never_stepped", f"{listed(names)} {reason}, so training does not change them. {remedy}", tuple(names)
            )
    return None


def _left_in_fp32(evidence: Evidence) -> Finding | None:
    names = evidence.uncast_matrices
    if not names:
        return None
    return Finding(
        "left_in_fp32",
        f"{listed(names)} is FP32 in a 16-bit model, and no rule of hf_lowprec.cast_model keeps it there. It was "
        "probably added after the cast: cast the model again before the optimizer is built, or name it in keep_fp32",
        tuple(names),
    )


RULES = (
    *(_not_finite, _updates_vanish, _second_moment_frozen, _weight_decay_lost),
    *(_norms_stand_still, _never_stepped, _left_in_fp32),
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
