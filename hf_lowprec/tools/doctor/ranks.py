"""Join the other processes of a launch, so that `hf-lowprec doctor` checks all of them together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from hf_lowprec.tools.doctor.tiny_training import training_arguments


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the process group of an `accelerate launch` or `torchrun`, as Trainer would, and leave it at the end."""
    _ = training_arguments().device  # reading this property starts the process group
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def abort() -> NoReturn:
    """End this process and with it the launch: other ranks may be waiting in a collective that this one left."""
    sys.stderr.flush()
    os._exit(1)


def rank() -> int:
    """This process's rank; 0 without a launch. Rank 0 prints for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """The number of ranks; 1 without a launch."""
    return dist.get_world_size() if dist.is_initialized() else 1
