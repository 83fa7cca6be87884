"""Ranks that are forked for tests."""

import os
import time

import psutil

from tests.support.processes.fork_ranks import fork_ranks

RANKS = 4


def test_no_rank_begins_before_all_are_forked(tmp_path):
    """Each counts the processes that were forked with it, and stays until all have counted."""
    before = {child.pid for child in psutil.Process().children()}

    def count(rank: int) -> None:
        forked = {child.pid for child in psutil.Process(os.getppid()).children()} - before
        (tmp_path / f"rank {rank}").write_text(str(len(forked)))
        while len(list(tmp_path.iterdir())) < RANKS:
            time.sleep(0.01)

    assert fork_ranks(count, RANKS) is None
    assert [int(file.read_text()) for file in tmp_path.iterdir()] == [RANKS] * RANKS
