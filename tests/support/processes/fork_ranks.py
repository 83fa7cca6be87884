"""Fork the ranks of a process group from a process that has imported everything already, with torch.multiprocessing."""

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

GRACE = 2.0
"""Seconds in which the other ranks may fail as well, once one has."""


def fork_ranks(action: Callable[[int], object], size: int) -> str | None:
    """Run `action(rank)` in `size` processes; if one of them fails, end the others, which would wait for it.

    No rank begins before all are forked: a connection to a store in this process takes locks in the store's thread, and
    a fork copies locks as they are, never to be released.

    Returns:
        Which ranks failed by themselves, with their tracebacks; None if all succeeded.
    """
    end_of_forks, forking = os.pipe()

    def act(rank: int) -> None:
        os.close(forking)
        os.read(end_of_forks, 1)  # returns when no process has the other end
        renew_thread_pool()
        action(rank)

    ranks = start_processes(act, nprocs=size, join=False, start_method="fork")
    os.close(forking)
    os.close(end_of_forks)
    try:
        while not ranks.join(grace_period=GRACE):
            pass
    except ProcessException:  # it has the traceback of one rank
        return "\n".join(_failures(ranks))
    return None


def renew_thread_pool() -> None:
    """Let torch replace the thread pool that a fork has left without threads.

    It does so at first use, without a lock: two threads of a forked process that use it first at once end the process
    with "Invalid thread pool".
    """
    torch.set_num_threads(torch.get_num_threads())


def _failures(ranks: ProcessContext) -> list[str]:
    failures = []
    for rank, (process, name) in enumerate(zip(ranks.processes, ranks.error_files, strict=True)):
        trace, file = "", Path(name)
        if file.exists():
            trace = pickle.loads(file.read_bytes())
            file.unlink()
        if process.exitcode not in (0, -signal.SIGTERM):  # which `join` sends to ranks that still run
            failures.append(f"rank {rank} of {len(ranks.processes)} failed\n{trace}")
    return failures
