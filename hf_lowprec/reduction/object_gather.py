"""Gather Python objects from all ranks: always, or only where they differ."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from hf_lowprec.reduction.collective_errors import explain_lost_rank


def gather_objects(value: Any, purpose: str = "comparing settings and weights") -> list[Any]:
    """Gather `value` from every rank, in rank order. Every rank must call it. Without ranks, returns `[value]`.

    Args:
        value: an object that pickles.
        purpose: the purpose, for the error message.

    Raises:
        RuntimeError: a rank was lost.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    group = dist.group.WORLD
    assert group is not None
    values: list[Any] = [None] * group.size()
    with explain_lost_rank(group, purpose):
        dist.all_gather_object(values, value)
    return values


def gather_if_different(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Gather `value` from every rank of `group` unless all ranks have the same. Every rank must call it.

    Digests are compared first, so ranks that agree exchange 16 bytes each.

    Args:
        value: an object that pickles, and whose `repr` is complete.
        group: all ranks by default.

    Returns:
        The values in rank order; None if all are the same.

    Raises:
        RuntimeError: a rank was lost.
    """
    group = group or dist.group.WORLD
    assert group is not None
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    digests: list[Any] = [None] * group.size()
    with explain_lost_rank(group, "comparing settings and weights"):
        dist.all_gather_object(digests, digest, group=group)
        if all(other == digest for other in digests):
            return None
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
    return values
