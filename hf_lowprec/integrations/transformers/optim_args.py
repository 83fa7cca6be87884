"""Parses `optim_args` into one `OptimArgs`, from which all other code reads its options.

transformers passes `optim_args` as one string, `"key=value,key=value"`, so the value of every option is a string.

The value of `rounding` may be a schedule, `"rounding=stochastic:0.8|kahan"`: each phase has a mode and the share of the
run's steps that it lasts; the last phase has no share and lasts until the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.arguments import Argument, split_items, values_of
from hf_lowprec.optim.optimizer_names import check_keywords, optimizer_factory
from hf_lowprec.rounding import MODES, mode_name

_OF_CALLBACK = ("keep_fp32", "grad_accumulation", "check_replicas_every", "reduction")
"""Keys that are options of `LowPrecisionCallback`."""


@dataclasses.dataclass(frozen=True)
class OptimArgs:
    """The parsed `optim_args`. Options that it does not set are empty or None.

    Attributes:
        optimizer: keyword arguments of the optimizer's class.
        keep_fp32: patterns of modules to keep in FP32, for `cast_model`.
        grad_accumulation: how the gradients of micro-batches are accumulated, for `prepare_accelerator`.
        check_replicas_every: steps between comparisons of replicas, for `LowPrecisionCallback`.
        reduction: how gradients are summed over ranks, for `prepare_accelerator`.
        rounding_schedule: the phases of `rounding`, if it has several; the optimizer is built in the mode of the first.
    """

    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    grad_accumulation: str | None = None
    check_replicas_every: int | None = None
    reduction: str | None = None
    rounding_schedule: RoundingSchedule | None = None


def optim_args_of(args: Any) -> OptimArgs:
    """Return the parsed `optim_args` of a `TrainingArguments` with one of our `optim` names.

    Raises:
        ValueError: a part is not of the form `key=value`, or a key is unknown or repeated.
    """
    if not isinstance(args.optim_args, str | None):
        raise ValueError(
            f"optim_args must be a string such as 'key=value,key=value'; got {type(args.optim_args).__name__}"
        )
    return _parsed_optim_args(optimizer_name(args), args.optim_args or "")


@functools.lru_cache(maxsize=16)  # both Trainer and transformers' dispatch table need it
def _parsed_optim_args(name: str, text: str) -> OptimArgs:
    cls, _ = optimizer_factory(name)
    options: dict[str, Any] = option_strings(text)
    expressible = [key for key, argument in cls.arguments.items() if argument.kind is not NoneType]
    of_optimizer = [key for key in expressible if key not in cls.flags]
    check_keywords(options, [*of_optimizer, *_OF_CALLBACK], f"optim_args for optim={name!r}")
    of_callback = {key: options.pop(key) for key in _OF_CALLBACK if key in options}
    if "keep_fp32" in of_callback:
        of_callback["keep_fp32"] = tuple(filter(None, split_items(of_callback["keep_fp32"])))
    if "check_replicas_every" in of_callback:
        every = Argument(int, default=0)
        of_callback["check_replicas_every"] = every.value_of(of_callback["check_replicas_every"])
        every.check("check_replicas_every", of_callback["check_replicas_every"], " in optim_args")
    if "rounding" in options:
        schedule = RoundingSchedule.parse(options["rounding"])
        options["rounding"] = schedule.phases[0].mode
        of_callback["rounding_schedule"] = schedule if len(schedule.phases) > 1 else None
    return OptimArgs(MappingProxyType(values_of(cls, options)), **of_callback)


def optimizer_name(args: Any) -> str:
    """Return the `optim` of `TrainingArguments` as a string."""
    return str(getattr(args.optim, "value", args.optim))


def option_strings(text: str) -> dict[str, str]:
    """Split `"key=value,key=value"` into a dictionary of strings. A comma not followed by `key=` belongs to the value.

    Raises:
        ValueError: a part is not of this form, or a key is repeated.
    """
    options: dict[str, str] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text) if text.strip() else ():
        key, separator, value = (field.strip() for field in part.partition("="))
        if not (key and separator and value) or "=" in value:
            raise ValueError(f"optim_args: {part!r} is not of the form key=value (pairs are separated by commas)")
        if key in options:
            raise ValueError(f"optim_args names {key!r} twice")
        options[key] = value
    return options


class Phase(NamedTuple):
    """A part of a run.

    Attributes:
        mode: its rounding mode.
        end: the share of the run's steps after which it ends.
    """

    mode: str
    end: float


@dataclasses.dataclass(frozen=True)
class RoundingSchedule:
    """A schedule of rounding modes: the phases of a run, in order; the last ends at 1.

    The mode depends only on the steps taken and the total number of steps, so a resumed run follows the same schedule.
    """

    phases: tuple[Phase, ...]

    @classmethod
    def parse(cls, text: str) -> RoundingSchedule:
        """Parse `mode:share|…|mode`.

        Raises:
            ValueError: a mode is unknown, a share is missing, superfluous or out of range, or they add up to 1 or more.
        """
        phases = [phase.split(":") for phase in split_items(text)]
        modes = [mode_name(mode) for mode, *_ in phases]
        try:
            shares = [float(share) for _, share in phases[:-1]]
            (_,) = phases[-1]
        except ValueError:
            shares = [math.nan]
        ends = list(itertools.accumulate(shares))
        valid = all(mode in MODES for mode in modes) and all(share > 0 for share in shares)
        if not valid or (ends and ends[-1] >= 1):
            raise ValueError(
                f"optim_args: rounding={text!r} cannot be parsed; use one of {', '.join(map(repr, MODES))}, or a "
                "schedule such as stochastic:0.8|kahan: modes separated by |, each but the last followed by its share "
                "of the steps; the shares must add up to less than 1"
            )
        return cls(tuple(map(Phase, modes, [*ends, 1.0])))

    def mode(self, step: int, max_steps: int) -> str:
        """Return the mode of the step that follows `step` steps of a run of `max_steps`."""
        return next((phase.mode for phase in self.phases if step < round(phase.end * max_steps)), self.phases[-1].mode)

    def apply(self, optimizer: LowPrecisionOptimizer, step: int, max_steps: int) -> bool:
        """Give all param groups the mode of the step that follows `step` steps. Return whether a mode has changed."""
        mode = self.mode(step, max_steps)
        changed = [group for group in optimizer.param_groups if group["rounding"] != mode]
        for group in changed:
            group["rounding"] = mode
        return bool(changed)

    def describe(self, max_steps: int) -> str:
        """Return the phases with the numbers of their last steps, for the precision report."""
        *first, last = self.phases
        words = [f"{phase.mode} to step {round(phase.end * max_steps)}" for phase in first]
        return ", ".join([*words, f"then {last.mode}"])
