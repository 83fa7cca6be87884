"""Explain a collective's failure after the loss of a rank by an error that says where to look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def explain_lost_rank(group: dist.ProcessGroup, purpose: str = "averaging gradients") -> Iterator[None]:
    """Explain why a collective failed: another rank has ended, hangs or cannot be reached.

    Args:
        group: the process group of the collectives inside.
        purpose: their purpose, for the message.

    Raises:
        RuntimeError: in place of the backend's RuntimeError, whose text it repeats.
    """
    try:
        yield
    except RuntimeError as error:
        rank, ranks = group.rank(), group.size()
        raise RuntimeError(
            f"rank {rank} of {ranks} lost another rank while {purpose} ({error}). Look at the output of the "
            "rank that ended first: the others only lost their connection to it. If a rank hangs, the others wait "
            "until the process group's timeout. To continue from the last complete checkpoint, use "
            "resume_from_checkpoint=True"
        ) from error
