"""The benchmark of Muon's step, once on tiny matrices."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

import muon_step_time  # noqa: E402
from cpu_step.processes import write_result  # noqa: E402

SHAPES: list = [(2, (8, 16)), (1, (3, 8, 8))]


@pytest.fixture
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_runs(same_threads):
    rows = muon_step_time.run(1, 1, SHAPES)
    baseline, *others = rows[0]
    assert baseline["optimizer"] == "torch Muon, FP32" and baseline["ratio"] == 1
    assert [row["optimizer"].split()[-1] for row in others] == ["BF16", "kahan", "split", "stochastic"]
    assert all(row["ratio"] > 0 and row["peak_bytes"] > 0 for row in rows[1])
    printed = muon_step_time.table([rows, rows], SHAPES)
    assert len(printed.splitlines()) == 4 and "| 1 × (3 × 8 × 8) |" in printed


def test_a_result_says_what_it_was_measured_on(tmp_path):
    write_result(tmp_path / "new" / "result.json", 2, clock="CPU time", processes=[[1.5]])
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert list(result) == ["machine", "versions", "clock", "processes"]
    assert result["machine"].endswith(", 2 threads") and result["versions"]["torch"] == torch.__version__
    assert result["processes"] == [[1.5]]
