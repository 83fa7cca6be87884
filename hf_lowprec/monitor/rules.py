"""The faults that a run can have, and the limit above which a share counts as lost.

Whether it is measured during training, read from checkpoints or predicted, the same fault has the same code, words and
limits.

A share counts as lost if it is above one half by three standard errors. Unbiased rounding loses nothing on average, so
chance would have to add 0.5 plus three standard errors. Rounding to nearest that still works (updates of a spacing or
more) loses a few percent; where updates are below half a spacing, it loses nearly all. Few runs are between the two,
and they lose at least half of what they were meant to learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hf_lowprec.casting import make_plan
from hf_lowprec.monitor.gradient_record import GradientRecord
from hf_lowprec.monitor.step_precision import ALL, COLUMN, StepPrecision
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, recommended_mode
from hf_lowprec.tensor_names import listed, parameter_kinds

LOST = 0.5
"""The share above which something counts as lost, see above."""
STANDARD_ERRORS = 3
FEW = 0.2
"""The share of changed weights below which unknown updates count as lost. Where rounding to nearest loses half of the
updates, about a quarter of the weights change, with Adam as with SGD."""
FULL_GRADIENTS = ("attention", "mlp", "adapters", "other")
"""Kinds of parameters whose elements have gradients of about one size, unlike embeddings and heads with rare words."""


class Fault(NamedTuple):
    """A kind of finding.

    Attributes:
        what: what is wrong; each message begins with it.
        remedy: what to do, if that does not depend on how the fault was found.
    """

    what: str
    remedy: str = ""


FAULTS = {
    "updates_lost": Fault("Weight updates are lost in rounding"),
    "weight_decay_lost": Fault("Weight decay is lost in rounding"),
    "second_moment_frozen": Fault(
        "The second moment does not decay, so steps stay too short after large gradients",
        'Use state_rounding="stochastic", the default of hf_lowprec\'s optimizers, or FP32 states',
    ),
    "norms_never_moved": Fault(
        "Norms do not move",
        "Cast the model with hf_lowprec.cast_model, which keeps norms in FP32: near 1, 16-bit numbers are far apart",
    ),
    "never_moved": Fault("Weights do not move"),
    "nothing_moved": Fault("No weight has moved"),
    "not_trained": Fault("Weights are not trained"),
    "not_finite": Fault(
        "Weights are NaN or infinite",
        "Find the batch or layer where it starts, and resume from an earlier checkpoint",
    ),
    "left_in_fp32": Fault(
        "Matrices are FP32 in a 16-bit model",
        "Cast the model with hf_lowprec.cast_model before the optimizer is built, or if FP32 is intended, name them in "
        "keep_fp32",
    ),
    "norms_of_16_bits": Fault(
        "Norms are in 16 bits, although other norms are FP32",
        "Load the checkpoint with dtype=torch.float32, and let hf_lowprec.cast_model cast the rest",
    ),
}
"""Every kind of finding by its code. Codes are stable, for programs."""


class Finding(NamedTuple):
    """A problem that the monitor or `hf-lowprec inspect` has found.

    Attributes:
        code: the kind of finding; stable, for programs.
        message: what is wrong, why, and what to do.
        tensors: the names of the affected tensors; empty if the whole model is affected.
    """

    code: str
    message: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message


def report(code: str, tensors: Iterable[str] | None, evidence: str, remedy: str | None = None) -> list[Finding]:
    """Return a finding, or none if `tensors` is empty.

    Args:
        code: one of `FAULTS`.
        tensors: the names of the affected tensors; None if the whole model is affected.
        evidence: what shows the fault, without a period at the end. `{names}` stands for the tensors' names.
        remedy: what to do, without a period at the end; None for the remedy in `FAULTS`.
    """
    names = tuple(tensors or ())
    if tensors is not None and not names:
        return []
    fault = FAULTS[code]
    remedy = fault.remedy if remedy is None else remedy
    message = f"{fault.what}: {evidence.format(names=listed(names))}." + (f" {remedy}." if remedy else "")
    return [Finding(code, message, names)]


def is_lost(numbers: Mapping[str, float], name: str, more_than: float = LOST) -> bool:
    """Return whether a share is above `more_than` by three standard errors."""
    return numbers.get(name, 0.0) - STANDARD_ERRORS * numbers.get(f"{name}_error", 0.0) > more_than


def fp32_among_16_bits(matrices: Mapping[str, torch.dtype]) -> list[str]:
    """Return the names of FP32 matrices, if more matrices are 16-bit.

    Adapters, and the trained copies of modules that PEFT makes, are FP32 on purpose.
    """
    narrow = sum(dtype in LOW_PRECISION_DTYPES for dtype in matrices.values())
    wide = [name for name, dtype in matrices.items() if dtype.itemsize > 2]
    kinds = parameter_kinds(dict.fromkeys(wide, (0, 0)))
    wide = [name for name in wide if kinds[name] != "adapters" and "modules_to_save" not in name]
    return wide if len(wide) < narrow else []


def names_to_cast(model: nn.Module) -> set[str]:
    """Return the names of the tensors that `cast_model` would cast, given the `keep_fp32` of earlier casts."""
    return {tensor.name for tensor in make_plan(model).tensors if tensor.action == "cast"}


@dataclass(frozen=True)
class MeasuredRun:
    """A run with a measured step.

    Attributes:
        optimizer: the optimizer.
        precision: the last measurement.
        steps: how many steps the optimizer had taken by then, since training began.
        gradients: which parameters have had gradients in the measured steps.
        uncast_matrices: see `uncast_matrices`.
    """

    optimizer: torch.optim.Optimizer
    precision: StepPrecision
    steps: int
    gradients: GradientRecord
    uncast_matrices: Sequence[str]

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong."""
        yield from self._not_finite()
        yield from self._updates_lost()
        yield from self._second_moment_frozen()
        yield from self._weight_decay_lost()
        yield from self._norms_never_moved()
        yield from self._not_trained()
        shown = "{names}, probably added after the cast, since no rule of the cast keeps them in FP32"
        yield from report("left_in_fp32", self.uncast_matrices, shown)

    def _not_finite(self) -> list[Finding]:
        precision, remedy = self.precision, FAULTS["not_finite"].remedy
        if isinstance(optimizer := self.optimizer, LowPrecisionOptimizer) and not (
            optimizer.skip_nonfinite or optimizer.gradients.stepped_in_parts
        ):
            remedy += "; skip_nonfinite=True skips such steps"
        finite = precision.sums[:, [COLUMN["update_square"], COLUMN["weight_square"]]].isfinite().all(1).tolist()
        names = [name for name, is_finite in zip(precision.names, finite, strict=True) if not is_finite]
        shown = f"{{names}} or their updates, in {self._step()}"
        return report("not_finite", names, f"{shown}. They stay so, and Trainer logs losses that are NaN as 0", remedy)

    def _updates_lost(self) -> list[Finding]:
        changed, lost = [], {}
        for kind, numbers in self.precision.by_kind.items():
            if kind in FULL_GRADIENTS and "changed" in numbers and self._loses_updates(numbers):
                changed.append(numbers["changed"])
            if kind != "norms" and is_lost(numbers, "lost_updates"):
                lost[kind] = numbers["lost_updates"]
        tensors = None
        if changed:
            shown = f"only {min(changed):.1%} of the 16-bit weights changed in"
        elif ALL in lost:
            shown = f"{lost[ALL]:.0%} of those of"
        elif lost:
            shown = f"{max(lost.values()):.0%} of those of {_joined([*lost])} weights of"
            kind_by_name = zip(self.precision.names, self.precision.kinds, strict=True)
            tensors = [name for name, kind in kind_by_name if kind in lost]
        else:
            return []
        return report("updates_lost", tensors, f"{shown} {self._step()}", self._remedy())

    def _loses_updates(self, numbers: dict[str, float]) -> bool:
        """Return whether the weights with these numbers lose most of their updates."""
        if "changed" not in numbers:
            return is_lost(numbers, "lost_updates")
        rate_is_zero = self.precision.learning_rate == 0  # as in the first step of a warm-up
        return numbers["changed"] < FEW and not rate_is_zero and self._rounds_to_nearest(numbers)

    def _rounds_to_nearest(self, numbers: dict[str, float]) -> bool:
        """Return whether an optimizer of another library rounds to nearest, as torch's and transformers' do.

        If few weights change in a step, rounding to nearest changes the same ones again and again. Stochastic rounding
        and compensations change the others in time.
        """
        by_chance = 1 - math.exp(-self.steps * numbers["changed"])
        return _library(self.optimizer) in ("torch", "transformers") or 1 - numbers["never_moved"] < FEW * by_chance

    def _second_moment_frozen(self) -> list[Finding]:
        numbers = self.precision.by_kind[ALL]
        if not is_lost(numbers, "lost_second_moment"):
            return []
        shown = f"{min(numbers['lost_second_moment'], 1):.0%} of its decay is lost in rounding ({self._description()})"
        remedy = "Remove state_rounding='nearest', or set state_dtype=torch.float32 for it"
        if all(group["state_rounding"] != "nearest" for group in self.optimizer.param_groups):
            # With stochastic rounding, only 8-bit codes cannot decay.
            shown += ". In 8 bits, it stays too large if gradients in the same row are about a million times larger"
            remedy = "Set state_dtype=exp_avg:int8|exp_avg_sq:bfloat16, also to resume"
        return report("second_moment_frozen", None, shown, remedy)

    def _weight_decay_lost(self) -> list[Finding]:
        numbers = self.precision.by_kind[ALL]
        if not is_lost(numbers, "lost_weight_decay"):
            return []
        decay = max(float(group.get("weight_decay") or 0.0) for group in self.optimizer.param_groups)
        shown = f"{numbers['lost_weight_decay']:.0%} of it ({self._description()}, weight_decay={decay:g})"
        return report("weight_decay_lost", None, shown, self._remedy())

    def _norms_never_moved(self) -> list[Finding]:
        precision = self.precision
        kinds = zip(precision.kinds, precision.dtypes, strict=True)
        rows = [row for row, (kind, dtype) in enumerate(kinds) if kind == "norms" and dtype in LOW_PRECISION_DTYPES]
        numbers = precision.values_of(rows)
        if not self._loses_updates(numbers) or numbers["never_moved"] <= LOST:
            return []
        shown = f"{numbers['never_moved']:.0%} of the 16-bit norm weights are what they were when training began"
        names = [precision.names[row] for row in rows]
        return report("norms_never_moved", names, f"{shown} ({{names}}; {self._description()})")

    def _not_trained(self) -> list[Finding]:
        """Return the first mistake in the gradients, if there is one."""
        findings = (report("not_trained", *mistake) for mistake in self.gradients.mistakes())
        return next(filter(None, findings), [])

    def _step(self) -> str:
        return f"step {self.precision.step} ({self._description()})"

    def _description(self) -> str:
        """Describe the optimizer, its rounding, and the largest learning rate of the measured step."""
        optimizer, rate = self.optimizer, self.precision.learning_rate
        library = _library(optimizer)
        text = f"{'torch.optim' if library == 'torch' else library}.{type(optimizer).__name__}"
        if isinstance(optimizer, LowPrecisionOptimizer):
            text += f", rounding={_joined(sorted({repr(group['rounding']) for group in optimizer.param_groups}))}"
        return text if rate is None else f"{text}, learning rate {rate:g}"

    def _remedy(self) -> str:
        """Return the remedy for lost updates. All modes but nearest lose only what FP32 weights lose as well."""
        groups, best = self.optimizer.param_groups, recommended_mode(self.precision.dtypes)
        if not isinstance(self.optimizer, LowPrecisionOptimizer):
            name = type(self.optimizer).__name__
            name = name if f"{name.lower()}_bf16_{best}" in OPTIMIZER_NAMES else "AdamW"
            optim = f"{name.lower()}_bf16_{best}"
            return f"Use optim={optim!r} or hf_lowprec.{name} with rounding={best!r}, which stores all of them"
        if any(group["rounding"] == "nearest" for group in groups):
            return f"Use rounding={best!r}, which stores all of them"
        if any(MODES[g["rounding"]].has_compensation and g["state_rounding"] == "nearest" for g in groups):
            return "Remove state_rounding='nearest', with which the compensation loses them"
        return "They are too small for FP32 weights as well: raise the learning rate"


def _library(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _joined(words: Sequence[str]) -> str:
    """Join words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def uncast_matrices(model: nn.Module) -> list[str]:
    """Return the names of trained FP32 matrices that `cast_model` would cast, if more trained matrices are 16-bit."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    wide = fp32_among_16_bits({name: p.dtype for name, p in params.items() if len(full_shape(p)) > 1})
    cast = names_to_cast(model) if wide else set()
    return [name for name in wide if name in cast]
