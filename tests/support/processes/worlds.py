"""Run a check on all ranks of worlds of several sizes, one world after the other, from one script."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist

from tests.support.processes.fork_ranks import fork_ranks
from tests.support.processes.ranks import leave


def run_worlds(check: Callable[[], None], sizes: Iterable[int]) -> None:
    """Run `check` on all ranks of a gloo world of each size; ends this process if one of them fails."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:

            def act(rank: int, size: int = size, store: str = f"file://{folder}/store") -> None:
                patience = timedelta(seconds=60)
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
                check()
                leave()

            failure = fork_ranks(act, size)
            if failure is not None:
                sys.exit(failure)
