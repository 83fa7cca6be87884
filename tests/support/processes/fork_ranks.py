"""Ranks that are forked from a process which has imported everything already: importing takes seconds of each rank."""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PATIENCE = 2.0
"""Seconds that ranks are given to fail as well, once one has."""


def fork_ranks(action: Callable[[int], object], size: int, folder: Path) -> str | None:
    """Run `action(rank)` in `size` processes; if one of them fails, end the others, which would wait for it.

    Returns:
        What failed, with its trace, or None; traces go through `folder`.
    """
    sys.stdout.flush()
    failed = _failures([_fork(action, rank, folder) for rank in range(size)])
    traces = {rank: folder / f"trace {rank}" for rank in failed}
    stories = [f"rank {rank} of {size} failed\n" + (t.read_text() if t.exists() else "") for rank, t in traces.items()]
    return "\n".join(stories) or None


def _fork(action: Callable[[int], object], rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    if sys.platform == "linux":  # leave no rank behind that waits for ever, if a test gives this script up
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        action(rank)
        status = 0
    except BaseException as end:
        if isinstance(end, SystemExit) and not end.code:
            status = 0
        else:
            (folder / f"trace {rank}").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(status)


def _failures(children: list[int]) -> list[int]:
    """Wait for all; once one has failed, for a moment only. The ranks that failed by themselves."""
    running, failed, ended, deadline = dict(enumerate(children)), [], set(), float("inf")
    while running:
        for rank, child in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del running[rank]
                if status and rank not in ended:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + PATIENCE)
            elif time.monotonic() > deadline and rank not in ended:
                ended.add(rank)
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return failed
