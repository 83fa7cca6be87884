"""What is wrong with a run, by its last measured step and the gradients of all of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.rules import FAULTS, LOST, Finding, fp32_among_16_bits, is_lost, names_to_cast, report
from hf_lowprec.monitor.step_precision import ALL, COLUMN, StepPrecision
from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.gradients.collector import GradientCollector
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.optim.sharding import full_shape
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, MODES, recommended_mode
from hf_lowprec.tensor_names import layer_number, name_pattern

FEW = 0.2
"""The share of changed weights below which updates count as lost if they are not known. Where rounding to nearest loses
half of them, about a quarter of the weights change, with Adam as with SGD."""
FULL_GRADIENTS = ("attention", "mlp", "adapters", "other")
"""Kinds of parameters whose elements have gradients of about one size, unlike embeddings and heads with rare words."""
ENOUGH_MEASUREMENTS = 3
"""Measured steps without a gradient after which a tensor is said to have none. The first is not enough: `lora_A` has a
gradient of zero until `lora_B` has moved, and a router may send nothing to an expert."""
_FREEZE = "if they are not meant to be trained, set requires_grad=False"
_DETACHED = f"Look for detach() or torch.no_grad() around what is computed from them; {_FREEZE}"


class GradientRecord:
    """Which parameters have had gradients in the measured steps, and of which of the others this is a mistake.

    In a quarter of transformers' model classes, some parameters have none by design: BERT's pooler if the loss does not
    use it, the last layer of LLaVA's vision tower, the cross-attention of a decoder on its own, an image tower while
    all inputs are texts. So a missing gradient alone is no reason to warn.

    Attributes:
        steps: the number of measured steps.
        present: for each parameter of the optimizer, then for each that it lacks, whether it has had a gradient.
        nonzero: for each parameter of the optimizer, whether it has had one that is not zero.

    Args:
        names: the names of the optimizer's parameters.
        params: these parameters.
        model: the model, if it is known.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], model: nn.Module | None) -> None:
        left_out = {} if model is None else parameters_left_out(model, params)
        self._names = [*names, *left_out]
        self._params = [*params, *left_out.values()]
        self._in_model = None if model is None else set(model.parameters())
        self.steps = 0
        self.present = [False] * len(self._names)
        self.nonzero = [False] * len(names)

    def present_now(self, collector: GradientCollector | None) -> list[bool]:
        """Which parameters have a gradient now, in the order of `present`.

        Args:
            collector: has taken gradients that are in `param.grad` no more.
        """
        taken = (lambda param: False) if collector is None else collector.has_taken
        return [param.grad is not None or taken(param) for param in self._params]

    def add(self, present: Sequence[bool], nonzero: Sequence[bool]) -> None:
        """Add a measured step: what `present_now` has returned before it, and which gradients were not zero."""
        self.steps += 1
        self.present = [a or b for a, b in zip(self.present, present, strict=True)]
        self.nonzero = [a or b for a, b in zip(self.nonzero, nonzero, strict=True)]

    def findings(self) -> list[Finding]:
        """The first mistake that is found, if there is any."""
        if self.steps < ENOUGH_MEASUREMENTS:
            return []
        if any(self.present[: len(self.nonzero)]) and not any(self.nonzero):
            return report(
                "not_trained",
                None,
                f"all gradients were exactly zero in each of {self.steps} measured steps, so the loss is constant",
                "Look for rewards that are all the same, which in GRPO give advantages of zero, or for a loss that is "
                "multiplied by zero",
            )
        found = (report("not_trained", names, f"{{names}} {why}", remedy) for names, why, remedy in self._mistakes())
        return next(filter(None, found), [])

    def _mistakes(self) -> Iterator[tuple[Iterable[str], str, str]]:
        """Parameters, why they are not trained, and what to do."""
        count, names, params = len(self.nonzero), self._names, self._params
        no_gradient = f"had no gradient in any of {self.steps} measured steps"
        missing = [row for row in range(count) if not self.present[row]]
        yield (
            [names[row] for row in range(count) if self.present[row] and not self.nonzero[row]],
            f"had a gradient of zeros in all of {self.steps} measured steps",
            f"Look for outputs that are masked or multiplied by zero; {_FREEZE}",
        )
        if self._in_model is not None:
            yield (
                [names[row] for row in missing if params[row] not in self._in_model],
                f"{no_gradient} and are not in the model",
                "Build the optimizer after what replaces parameters, such as model.resize_token_embeddings",
            )
        if missing:  # seldom, and names take time
            # What a task does not use are last layers; what `detach()` cuts off are first ones.
            last_layer: dict[str, int] = defaultdict(lambda: -1)  # that has had a gradient, by pattern of names
            for name in (names[row] for row in range(count) if self.present[row]):
                last_layer[name_pattern(name)] = max(last_layer[name_pattern(name)], layer_number(name))
            yield (
                [names[row] for row in missing if layer_number(names[row]) < last_layer[name_pattern(names[row])]],
                f"{no_gradient}, although the same weights of later layers had one",
                _DETACHED,
            )
        elements = [param.numel() for param in params[:count]]
        if 2 * sum(elements[row] for row in missing) > sum(elements):
            yield [names[row] for row in missing], f"{no_gradient} and are more than half of all weights", _DETACHED
        yield (
            [names[row] for row in range(count, len(names)) if self.present[row]],
            "have gradients but are not among the optimizer's parameters",
            f"Pass them to the optimizer; {_FREEZE}",
        )


def parameters_left_out(model: nn.Module, params: Sequence[Tensor]) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model that are not among an optimizer's `params`, if these are more than half.

    An optimizer with fewer was given them on purpose: another one trains the rest, or nothing does.
    """
    stepped = set(params)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = {name: param for name, param in trainable.items() if param not in stepped}
    return missing if 2 * len(missing) < len(trainable) else {}


@dataclass(frozen=True)
class MeasuredRun:
    """A run, of which a step was measured.

    Attributes:
        optimizer: the optimizer.
        precision: the last measurement.
        steps: how many steps the optimizer had taken then, since training began.
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
        yield from self.gradients.findings()
        shown = "{names}, probably added after the cast, since none of its rules keeps them there"
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
        """Return whether an optimizer of another library rounds to nearest. Those of torch and transformers do.

        If few weights change in a step, rounding to nearest changes the same ones again and again. Stochastic rounding
        and compensations get to the others in time.
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
            # Rounded stochastically, only codes of 8 bits cannot decay.
            shown += ". In 8 bits, it stays too large beside gradients about a million times larger in the same row"
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

    def _step(self) -> str:
        return f"step {self.precision.step} ({self._description()})"

    def _description(self) -> str:
        """The optimizer, its rounding, and the largest learning rate of the measured step."""
        optimizer, rate = self.optimizer, self.precision.learning_rate
        library = _library(optimizer)
        text = f"{'torch.optim' if library == 'torch' else library}.{type(optimizer).__name__}"
        if isinstance(optimizer, LowPrecisionOptimizer):
            text += f", rounding={_joined(sorted({repr(group['rounding']) for group in optimizer.param_groups}))}"
        return text if rate is None else f"{text}, learning rate {rate:g}"

    def _remedy(self) -> str:
        """The remedy for lost updates. All modes but nearest lose only those that FP32 weights lose as well."""
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
    """Words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def uncast_matrices(model: nn.Module) -> list[str]:
    """The names of trained FP32 matrices that `cast_model` would cast, if more of the trained matrices are 16-bit."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    wide = fp32_among_16_bits({name: p.dtype for name, p in params.items() if len(full_shape(p)) > 1})
    cast = names_to_cast(model) if wide else set()
    return [name for name in wide if name in cast]
