"""Worlds of several sizes, one after the other, forked from a process that has imported everything already."""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from tests.ranks import leave


def run_worlds(check: Callable[[], None], sizes: Iterable[int]) -> None:
    """Run `check` on all ranks of a gloo world of each size; ends this process if one of them fails."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_fork(check, rank, size, f"file://{folder}/store") for rank in range(size)]
            failed = _first_failure(ranks)
        if failed is not None:
            sys.exit(f"rank {failed} of {size} failed")


def _fork(check: Callable[[], None], rank: int, size: int, store: str) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        patience = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
        check()
        leave()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _first_failure(children: list[int]) -> int | None:
    """Wait for all; if one fails, end the others, which would wait for it, and say which one it was."""
    running = dict(enumerate(children))
    failed = None
    while running:
        for rank, child in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            del running[rank]
            if status and failed is None:
                failed = rank
                for other in running.values():
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
    return failed
