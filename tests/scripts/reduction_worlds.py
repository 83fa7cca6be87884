"""Worlds of several sizes, one after the other, forked from a process that has imported everything already."""

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.ranks import leave

PR_SET_PDEATHSIG = 1


def run_worlds(check: Callable[[], None], sizes: Iterable[int]) -> None:
    """Run `check` on all ranks of a gloo world of each size; ends this process if one of them fails."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_fork(check, rank, size, Path(folder)) for rank in range(size)]
            failed = _first_failure(ranks)
            if failed is not None:
                trace = Path(folder) / f"trace {failed}"
                sys.exit(f"rank {failed} of {size} failed\n" + (trace.read_text() if trace.exists() else ""))


def _fork(check: Callable[[], None], rank: int, size: int, folder: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    if sys.platform == "linux":  # leave no rank behind that waits for ever, if a test gives this script up
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        store, patience = f"file://{folder}/store", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
        check()
        leave()
    except BaseException:
        (folder / f"trace {rank}").write_text(traceback.format_exc())
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
