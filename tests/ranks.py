"""Real processes on gloo: starting them from a test, and ending them in a script."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

many_ranks = pytest.mark.skipif(not os.environ.get("HF_LOWPREC_MANY_RANKS"), reason="runs with make test-distributed")
SCRIPTS = Path(__file__).resolve().parent / "scripts"


def run_ranks(
    script: str, ranks: int, *arguments: str, timeout: float = 280, fails: bool = False, **environment
) -> str:
    """What the ranks of `tests/scripts/SCRIPT` print; fails the test if one fails, or if `fails` and none does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_command([*launcher, str(SCRIPTS / script), *arguments], timeout, fails, **environment)


def run_command(command: list[str], timeout: float = 280, fails: bool = False, **environment: str) -> str:
    """What a command prints, with this repository on the path and one thread per process; `fails` as above."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1]), **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
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
