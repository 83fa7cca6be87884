"""Real processes on gloo: starting them from a test, and ending them in a script."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.processes import forkserver

many_ranks = pytest.mark.skipif(not os.environ.get("HF_LOWPREC_MANY_RANKS"), reason="runs with make test-distributed")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run_ranks(script: str, ranks: int, *arguments: str, fails: bool = False, **environment: str) -> str:
    """What the ranks of `tests/scripts/SCRIPT` print; fails the test if one fails, or if `fails` and none does."""
    return run_script("forked_ranks.py", ranks, SCRIPTS / script, *arguments, fails=fails, **environment)


def run_script(script: str, *arguments: object, fails: bool = False, **environment: str) -> str:
    """What `tests/scripts/SCRIPT` prints; `fails` as above."""
    done = forkserver.run(SCRIPTS / script, [str(argument) for argument in arguments], timeout=280, **environment)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr if fails else done.stdout


def leave() -> None:
    """End this rank without taking gloo down, which aborts now and then: a thread of a group that is still joinable
    ends the process. All ranks wait for each other first."""
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
        time.sleep(1)
    os._exit(0)
