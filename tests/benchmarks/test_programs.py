"""The small benchmarks run, and write their records."""

import json

import pytest

from benchmarks import activation_memory


@pytest.mark.every_case
def test_estimates_of_activations_are_compared_with_allocations(tmp_path):
    """They are right for a small model."""
    size = ["--hidden", "128", "--layers", "2", "--batch", "2", "--length", "64", "--models", "Qwen3"]
    results = activation_memory.main([*size, "--output", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text())["results"] == results
    assert len(results) == 8
    assert max(abs(result["error"]) for result in results) < 0.15
