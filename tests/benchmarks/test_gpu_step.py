"""The GPU benchmark, as far as it goes without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import forkserver

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_the_rehearsal_runs_every_part(tmp_path):
    done = run("--rehearse", "--seconds", "240", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert result["failures"] == []
    (table,) = (path.read_text() for path in tmp_path.glob("*.md"))
    for part in ("One step of", "Training", "Constants of the kernel", "kahan", "stochastic", "nearest"):
        assert part in table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = forkserver.run(SCRIPT, [], timeout=120)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
