"""A schedule of rounding modes: `optim_args="rounding=stochastic:0.8|kahan"`.

Each phase has a mode and the share of the run's steps that it lasts; the last phase has no share and lasts until the
end. The mode depends only on the number of steps taken and of all steps, so a resumed run follows the same schedule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from hf_lowprec.optim import LowPrecisionOptimizer
from hf_lowprec.optim.arguments import split_items
from hf_lowprec.rounding import MODES, mode_name

EXPECTED = (
    f"use one of {', '.join(map(repr, MODES))}, or a schedule such as stochastic:0.8|kahan: modes separated by |, each "
    "but the last with its share of the steps, and the shares less than 1 in total"
)


class Phase(NamedTuple):
    """A part of a run.

    Attributes:
        mode: its rounding mode.
        end: the share of the run's steps after which it ends.
    """

    mode: str
    end: float


@dataclass(frozen=True)
class RoundingSchedule:
    """The phases of a run, in order; the last ends at 1."""

    phases: tuple[Phase, ...]

    @classmethod
    def parse(cls, text: str) -> RoundingSchedule:
        """Parse `mode:share|…|mode`.

        Raises:
            ValueError: a mode is unknown, a share is missing, superfluous or out of range, or they add up to 1 or more.
        """
        *first, last = ([part.strip() for part in phase.split(":")] for phase in split_items(text))
        if any(len(phase) != 2 for phase in first) or len(last) != 1:
            raise ValueError(text)
        shares = [float(share) for _, share in first]
        ends = [*itertools.accumulate(shares), 1.0]
        modes = [mode_name(mode) for mode, *_ in (*first, last)]
        if not all(mode in MODES for mode in modes) or not all(share > 0 for share in shares):
            raise ValueError(text)
        if shares and not ends[-2] < 1:
            raise ValueError(text)
        return cls(tuple(map(Phase, modes, ends)))

    def mode(self, step: int, max_steps: int) -> str:
        """The mode of the step that follows `step` steps of a run of `max_steps`."""
        return next((phase.mode for phase in self.phases if step < round(phase.end * max_steps)), self.phases[-1].mode)

    def apply(self, optimizer: LowPrecisionOptimizer, step: int, max_steps: int) -> bool:
        """Give all param groups the mode of the step that follows `step` steps. Returns whether a mode has changed."""
        mode = self.mode(step, max_steps)
        changed = [group for group in optimizer.param_groups if group["rounding"] != mode]
        for group in changed:
            group["rounding"] = mode
        return bool(changed)

    def describe(self, max_steps: int) -> str:
        """The phases with the numbers of their last steps, for the precision report."""
        *first, last = self.phases
        words = [f"{phase.mode} to step {round(phase.end * max_steps)}" for phase in first]
        return ", ".join([*words, f"then {last.mode}"])
