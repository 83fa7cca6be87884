"""Something that is wrong with a run, or with what it left in files."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        code: names the kind of finding; stable, for programs.
        message: what is wrong, why, and what to do.
        tensors: the names of all tensors concerned; empty if it concerns the whole model.
    """

    code: str
    message: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message
