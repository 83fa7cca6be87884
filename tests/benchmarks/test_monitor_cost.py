"""The benchmark of the monitor's cost, once on a tiny model."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

import monitor_cost  # noqa: E402


def test_it_runs(tmp_path, monkeypatch, capsys):
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setattr(monitor_cost, "MODELS", {"tiny": tiny})
    monitor_cost.main(["--steps", "2", "--output", str(tmp_path / "cost.json")])
    assert capsys.readouterr().out.count(" at 500") == 4
    for result in json.loads((tmp_path / "cost.json").read_text())["results"]:
        shares = result["share of a step by interval"]
        assert shares["1"] == pytest.approx(500 * shares["500"])
