"""A rank that dies or hangs in the middle of a backward pass: the others end with an error, they do not hang."""

import re
import signal
import sys

import pytest

from tests.support.processes.ranks import SCRIPTS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are watched through /proc"),
]

RANKS, VICTIM = 3, 1
STARTED, SLACK = 240, 45
"""Seconds in which ranks reach the fault, and in which they end after it, on a busy machine."""

DISCONNECTED = "Connection (closed|reset) by peer|Broken pipe"
TIMED_OUT = "Timed out waiting|Application timeout"
"""Gloo's messages; other collectives in flight blame a timeout on the application."""


def start(processes, store, kind: str, signal_name: str, timeout: int):
    """Start the victim and the others one by one: a launcher would end the others, so that the test proves nothing."""
    ranks = [
        processes.fork(
            f"rank {rank}",
            SCRIPTS / "distributed_death.py",
            *(kind, signal_name, timeout, processes.folder),
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=RANKS,
            LOCAL_WORLD_SIZE=RANKS,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=store.port,
            TORCHELASTIC_USE_AGENT_STORE=True,
        )
        for rank in range(RANKS)
    ]
    return ranks[VICTIM], ranks[:VICTIM] + ranks[VICTIM + 1 :]


def assert_says_why(survivors, kind: str, reason: str) -> None:
    where = "reduction/rank_mean.py" if kind.startswith("zero") else "reduction/ddp.py"
    where = "reduction/fsdp2.py" if kind == "fsdp2" else where
    for rank in survivors:
        assert rank.code not in (0, None), rank.report()
        assert "Traceback" in rank.err, rank.report()
        assert where in rank.err, rank.report()  # it waited for gradients, not for something before or after
        last = rank.err[rank.err.rindex(where) :]
        assert re.search(reason, last), rank.report()
        assert re.search(rf"rank \d of {RANKS} lost another rank while averaging gradients", last), rank.report()


@pytest.mark.parametrize("kind", ["trainer", "fsdp2"])
def test_a_rank_dies(processes, store, kind):
    check_death(processes, store, kind)


def check_death(processes, store, kind: str) -> None:
    """Kill a rank; the others notice, and say why they end."""
    timeout = 180
    victim, survivors = start(processes, store, kind, "SIGKILL", timeout)
    processes.wait("the rank has not died", lambda: victim.code is not None, STARTED)
    assert victim.code == -signal.SIGKILL, victim.report()
    took = processes.wait_for_end(survivors, SLACK)
    assert took < timeout / 2  # they noticed, and did not wait for the timeout
    assert_says_why(survivors, kind, DISCONNECTED)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_hangs(processes, store, kind):
    timeout = 6
    victim, survivors = start(processes, store, kind, "SIGSTOP", timeout)
    processes.wait("the rank has not stopped", lambda: victim.code is not None or victim.stopped, STARTED)
    assert victim.code is None, victim.report()
    processes.wait_for_end(survivors, timeout + SLACK)
    assert_says_why(survivors, kind, f"{TIMED_OUT}|{DISCONNECTED}")  # the first to give up disconnects from the other
    assert any(re.search(TIMED_OUT, rank.err) for rank in survivors)
    assert victim.code is None
