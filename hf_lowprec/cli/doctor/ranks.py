"""The processes that check together, if they were launched so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from hf_lowprec.cli.doctor.training import arguments

T = TypeVar("T")


@contextmanager
def launched() -> Iterator[None]:
    """Join the other processes of an `accelerate launch` or `torchrun`, as Trainer would, and leave them at the end."""
    _ = arguments().device  # asking for it is what starts the process group
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def first() -> bool:
    """Whether this process speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(value: T) -> list[T]:
    """Every rank's `value`, in rank order."""
    if not dist.is_initialized():
        return [value]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
