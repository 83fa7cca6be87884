"""The processes that check together, if they were launched so."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch.distributed as dist

from hf_lowprec.cli.doctor.training import arguments

T = TypeVar("T")


@contextmanager
def launched() -> Iterator[None]:
    """Join the other processes of an `accelerate launch` or `torchrun`, as Trainer would, and leave them at the end."""
    _ = arguments().device  # asking for it is what starts the process group
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def give_up() -> NoReturn:
    """End this process, and with it the launch: another rank may be waiting in the midst of what this one left."""
    sys.stderr.flush()
    os._exit(1)


def rank() -> int:
    """This process's; the first speaks for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def several() -> bool:
    """Whether there are others."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gathered(value: T) -> list[T]:
    """Every rank's `value`, in rank order."""
    if not dist.is_initialized():
        return [value]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
