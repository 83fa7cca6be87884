"""The benchmark of activations runs, and its estimates are right for a small model."""

import json
from pathlib import Path

import pytest

from benchmarks import activation_memory


@pytest.mark.every_case
def test_estimates_are_compared_with_allocations(tmp_path: Path) -> None:
    size = ["--hidden", "128", "--layers", "2", "--batch", "2", "--length", "64", "--models", "Qwen3"]
    results = activation_memory.main([*size, "--output", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text())["results"] == results
    assert len(results) == 8
    assert max(abs(result["error"]) for result in results) < 0.15
