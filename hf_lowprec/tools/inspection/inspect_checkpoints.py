"""Inspects one checkpoint or two: opens them, reads every tensor, and collects what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hf_lowprec.integrations.transformers.checkpoints.manifest import check_files
from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.tools.inspection.checkpoint import Checkpoint, open_checkpoint
from hf_lowprec.tools.inspection.comparison import Comparison, compare_checkpoints
from hf_lowprec.tools.inspection.findings_in_one import findings_in_one
from hf_lowprec.tools.inspection.findings_in_two import findings_in_two
from hf_lowprec.tools.inspection.training_record import Hyperparameters


class Inspection(NamedTuple):
    """The result of an inspection.

    Attributes:
        checkpoints: in order of time.
        comparison: what moved between them; None for one checkpoint.
        findings: what is wrong in the last checkpoint, between the two, and with the files of each.
    """

    checkpoints: list[Checkpoint]
    comparison: Comparison | None
    findings: list[Finding]


def inspect_checkpoints(
    model: str,
    other: str | None = None,
    given: Hyperparameters = Hyperparameters(),  # noqa: B008  # immutable
    progress: Callable[[str], None] = lambda text: None,
) -> Inspection:
    """Inspect a checkpoint, or compare it with a later one.

    Args:
        model: a folder, or a model on the Hub.
        other: a later checkpoint of the same model.
        given: the hyperparameters that the user has named.
        progress: called with a line about what is read next.

    Raises:
        InputError: a checkpoint cannot be opened, or the two do not belong together.
    """
    named = ((model, "MODEL"), (other, "OTHER"))
    opened = [open_checkpoint(name, argument, given, progress) for name, argument in named if name]
    damaged = [finding for checkpoint in opened for finding in _damaged(checkpoint)]
    if len(opened) == 1:
        return Inspection(opened, None, damaged + findings_in_one(opened[0]))
    earlier, later = opened
    comparison = compare_checkpoints(earlier, later, lambda name: progress(f"comparing {name}"))
    in_later = findings_in_one(later, compared=comparison.changes)
    return Inspection(opened, comparison, damaged + _without_repetitions(in_later, findings_in_two(comparison)))


def _damaged(checkpoint: Checkpoint) -> list[Finding]:
    """A finding if the files of a checkpoint are not those that its manifest lists."""
    try:
        check_files(checkpoint.folder, "checkpoint")
    except ValueError as error:
        return [Finding.of("damaged", str(error))]
    return []


_SAME = {
    "norms_never_moved": ("norms_never_moved",),
    "never_moved": ("never_moved", "not_trained"),
    "nothing_moved": ("norms_never_moved", "never_moved"),
}
"""Findings between checkpoints, and those in one that say less of the same tensors."""
_EXPLAINED = ("second_moment_frozen", "weight_decay_lost", "updates_lost")
"""Findings of which one checkpoint also tells why."""


def _without_repetitions(in_one: list[Finding], between: list[Finding]) -> list[Finding]:
    """All findings, but of two about the same tensors only the one that says more."""

    def covered(finding: Finding, by: list[Finding], codes: tuple[str, ...]) -> bool:
        return any(other.code in codes and {*finding.tensors} <= {*other.tensors} for other in by)

    new = [f for f in between if not covered(f, in_one, (f.code,) if f.code in _EXPLAINED else ())]
    says_more = {code: tuple(k for k, codes in _SAME.items() if code in codes) for code in (f.code for f in in_one)}
    return [f for f in in_one if not covered(f, new, says_more[f.code])] + new
