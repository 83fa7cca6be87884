"""`hf-lowprec doctor`: does everything work here? Each check does the thing itself, on a small scale."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Check that training works here: packages, names, backends, reduction, a short training.

    Exits with 1 if something is broken. What is only missing, and has a slower
    substitute, is said. To check the reduction between processes, launch it as
    a training: accelerate launch -m hf_lowprec doctor
    """
    from hf_lowprec.cli.doctor import checks, ranks

    broken = False
    with ranks.launched():
        for name, check in checks.CHECKS.items():
            own = checks.finding(check)
            if own.unexpected and ranks.several():
                typer.echo(f"{own.status:<8}{name:<11}{own.text} (rank {ranks.rank()})", err=True)
                ranks.give_up()
            findings = ranks.gathered(own)
            broken |= any(finding.status == checks.FAILED for finding in findings)
            if ranks.rank() == 0:
                for line in lines(name, findings):
                    typer.echo(line)
    raise typer.Exit(int(broken))


def lines(name: str, findings: list) -> list[str]:
    """A line for all ranks if they found the same, else one for each finding."""
    where: dict = {}
    for rank, finding in enumerate(findings):
        where.setdefault(finding, []).append(str(rank))
    return [
        f"{finding.status:<8}{name:<11}{finding.text}" + (f" (rank {', '.join(ranks)})" if len(where) > 1 else "")
        for finding, ranks in where.items()
    ]
