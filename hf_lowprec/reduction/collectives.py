"""Collectives: objects and tensors of all ranks, memory to receive them in, and an error if a rank is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def explain_lost_rank(group: dist.ProcessGroup, purpose: str = "averaging gradients") -> Iterator[None]:
    """Explain why a collective failed: another rank has ended, hangs or cannot be reached.

    Args:
        group: the process group of the collectives inside.
        purpose: their purpose, for the message.

    Raises:
        RuntimeError: replaces the backend's RuntimeError, whose text it repeats.
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


def gather_objects(
    value: Any, purpose: str = "comparing settings and weights", group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Gather `value` from every rank, in rank order. Every rank must call it. Without ranks, returns `[value]`.

    Args:
        value: an object that pickles.
        purpose: the purpose, for the error message.
        group: all ranks by default.

    Raises:
        RuntimeError: a rank was lost.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    group = group or dist.group.WORLD
    assert group is not None
    values: list[Any] = [None] * group.size()
    with explain_lost_rank(group, purpose):
        dist.all_gather_object(values, value, group=group)
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
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    digests = gather_objects(digest, group=group)
    return None if len(set(digests)) == 1 else gather_objects(value, group=group)


def all_gather(output: Tensor, shard: Tensor, **options: Any) -> Any:
    """All-gather into one tensor. torch 2.13 renamed the function."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return all_gather(output, shard, **options)


class ScratchBuffers:
    """Temporary memory that reductions reuse: flat tensors by name, dtype and device.

    Each grows to the largest size requested and is never freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, count: int, like: Tensor) -> Tensor:
        """Return `count` elements of a buffer, uninitialized and valid until the next request with that name.

        Args:
            name: distinguishes buffers that are in use at the same time.
            count: number of elements.
            like: a tensor of the dtype and on the device of the buffer.
        """
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = like.new_empty(count)
        return buffer[:count]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"_buffers": {}}  # contents are temporary
