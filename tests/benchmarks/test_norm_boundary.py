"""The benchmark of the norms' boundaries runs; what it measures is not for a test."""

import json
from pathlib import Path

from benchmarks import norm_boundary


def test_both_models_are_measured(tmp_path: Path) -> None:
    size = ["--hidden", "64", "--layers", "1", "--tokens", "8", "--vocabulary", "32", "--rounds", "2", "--threads", "1"]
    result = norm_boundary.main([*size, "--output", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text())["ratio"] == result["ratio"] > 0
    assert {f"{norm_boundary.CAST}, ms", f"{norm_boundary.PURE}, ms"} < result.keys()
