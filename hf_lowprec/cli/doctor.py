"""`hf-lowprec doctor`: check that training works on this machine by running each part of it on a small scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_lowprec.doctor.checks import Finding


def doctor() -> None:
    """Check this machine: packages, names, backends, reduction, a short training run.

    Exits with 1 if something is broken. Missing parts that have a slower
    substitute are reported but are not errors. To check the reduction between
    processes, launch it like a training script:
    accelerate launch -m hf_lowprec doctor
    """
    from hf_lowprec.doctor import checks, ranks
    from hf_lowprec.reduction.object_gather import gather_objects

    broken = False
    with ranks.joined_ranks():
        for name, check in checks.CHECKS.items():
            finding = checks.run_check(check)
            if finding.unexpected and ranks.count() > 1:
                typer.echo(f"{finding.status:<8}{name:<11}{finding.text} (rank {ranks.rank()})", err=True)
                ranks.abort()
            findings = gather_objects(finding, "checking this machine")
            broken |= any(finding.status == checks.FAILED for finding in findings)
            if ranks.rank() == 0:
                for line in lines(name, findings):
                    typer.echo(line)
    raise typer.Exit(int(broken))


def lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """Format a check's findings, given in rank order: one line if all ranks agree, else one for each finding."""
    ranks_by_finding: dict[Finding, list[str]] = {}
    for rank, finding in enumerate(findings):
        ranks_by_finding.setdefault(finding, []).append(str(rank))
    return [
        f"{finding.status:<8}{name:<11}{finding.text}"
        + (f" (rank {', '.join(ranks)})" if len(ranks_by_finding) > 1 else "")
        for finding, ranks in ranks_by_finding.items()
    ]
