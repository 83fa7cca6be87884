"""Findings: what is wrong in checkpoints, in sentences for users, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable

from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.tensor_names import listed


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "1 tensor", "2 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def finding(
    code: str, tensors: Iterable[str], evidence: str, remedy: str | None = None, noun: str = "tensor"
) -> list[Finding]:
    """One finding about some tensors, none if there are no tensors.

    Args:
        code: see `Finding.of`.
        tensors: see `Finding.of`.
        evidence: see `Finding.of`; with `{names}` for the first few names, and `{count}` for "3 tensors".
        remedy: see `Finding.of`.
        noun: what to count instead of tensors.
    """
    names = list(dict.fromkeys(tensors))
    if not names:
        return []
    shown = evidence.format(names=listed(names), count=counted(len(names), noun))
    return [Finding.of(code, shown, names, remedy)]
