"""The GPU benchmark, as far as it goes without a GPU."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.every_case
@pytest.mark.slow
def test_the_rehearsal_runs_every_part(tmp_path):
    done = run("--rehearse", "--seconds", "240", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert result["failures"] == []
    (table,) = (path.read_text() for path in tmp_path.glob("*.md"))
    for part in ("One step of", "Training", "kahan", "stochastic", "nearest"):
        assert part in table


def test_missing_packages_are_not_our_failure(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("gpu_step")
    monkeypatch.setattr(script, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(script.Budget, "stop_at_the_end", lambda self, grace: None)
    assert script.main(["--rehearse"]) == 2
    assert "pip install no_such_package" in capsys.readouterr().err


@pytest.mark.every_case
def test_a_trial_says_why_a_candidate_cannot_step(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    trial = importlib.import_module("gpu.trial")
    assert trial.trial_failure("torch AdamW, BF16, fused", True, 250) == ""
    assert "ValueError" in trial.trial_failure("no such candidate", True, 250)
    begin = time.monotonic()
    assert "more than 0 s" in trial.trial_failure("torch AdamW, BF16, fused", True, 0.2)
    assert time.monotonic() - begin < 20  # the process was ended, not waited for
