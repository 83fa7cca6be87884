"""The small benchmarks run, and write their records."""

import json

import pytest

from benchmarks import activation_memory, fine_tuning


@pytest.mark.every_case
def test_fine_tuning_compares_ways_that_begin_alike(tmp_path):
    output = tmp_path / "result.json"
    words = ["--seeds", "1", "--steps", "3", "--ways", "fp32,nearest,split", "--output", str(output)]
    fine_tuning.main(words)
    runs = json.loads(output.read_text())["runs"]
    exact, nearest, split = (runs[way][0] for way in ("fp32", "nearest", "split"))
    assert 4.5 < exact["loss"] < 6  # log(256) = 5.5
    assert split["loss"] == pytest.approx(exact["loss"], abs=1e-2)
    assert nearest["lost"] > 0.5 > abs(split["lost"])


@pytest.mark.every_case
def test_estimates_of_activations_are_compared_with_allocations(tmp_path):
    """They are right for a small model."""
    size = ["--hidden", "128", "--layers", "2", "--batch", "2", "--length", "64", "--models", "Qwen3"]
    results = activation_memory.main([*size, "--output", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text())["results"] == results
    assert len(results) == 8
    assert max(abs(result["error"]) for result in results) < 0.15
