"""The error raised when another rank dies, hangs or cannot be reached during a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def exchanging(group: dist.ProcessGroup, purpose: str = "averaging gradients") -> Iterator[None]:
    """Say where to look if a collective of `group` fails inside.

    Raises:
        RuntimeError: instead of the backend's, whose text it repeats.
    """
    try:
        yield
    except RuntimeError as error:
        rank, ranks = group.rank(), group.size()
        raise RuntimeError(
            f"rank {rank} of {ranks} lost another rank while {purpose} ({error}). Look at the output of the "
            "rank that ended first: the others only lost their connection to it. A rank that hangs is waited for until "
            "the process group's timeout. Training goes on from the last complete checkpoint with "
            "resume_from_checkpoint=True"
        ) from error
