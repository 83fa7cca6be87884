"""The text benchmark: all of it once on tiny sizes."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

from text_quality import main  # noqa: E402

from hf_lowprec.tools.demo import stages  # noqa: E402


@pytest.mark.every_case
def test_differences_are_paired_by_seed_and_recordings_are_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "VALIDATION_BLOCKS", 8)
    written = main(["--steps", "1", "--seeds", "0,1", "--paths", "2", "--output-dir", str(tmp_path)])
    assert written is not None
    out = capsys.readouterr().out
    assert "| fine-tuning | BF16 Kahan |" in out
    assert "from itself (4 runs)" in out
    found = json.loads(written.read_text(encoding="utf-8"))
    # After one step of 1e-3 / 50 a loss is that of the first weights, which a thousandth moves a little.
    assert len(set(found["other_paths"])) == 4 and max(map(abs, found["other_paths"])) < 1e-2
    first, second = (run["stages"][0]["runs"] for run in found["runs"])
    kahan = next(row for row in found["summary"] if (row["stage"], row["way"]) == ("pretraining", "kahan"))
    differences = [runs["kahan"]["final"] - runs["fp32"]["final"] for runs in (first, second)]
    noise = abs(first["fp32"]["final"] - second["fp32"]["final"]) / math.sqrt(2)
    assert kahan["difference_from_fp32"] == pytest.approx(sum(differences) / 2)
    assert kahan["difference_in_fp32_seed_noise"] == pytest.approx(sum(differences) / 2 / noise)

    text = json.dumps({**found, "seeds": [2, 3]})
    (tmp_path / "again.json").write_text(text, encoding="utf-8")
    assert main(["--join", str(written), str(tmp_path / "again.json")]) is None
    both = capsys.readouterr().out
    # The same twice: means stay, and a deviation has 3 degrees of freedom where it was summed over 1, twice.
    assert "over 4 seeds" in both and "from itself (8 runs)" in both
    assert f"| {kahan['mean']:.4f} ± {kahan['standard_deviation'] * math.sqrt(2 / 3):.4f} |" in both

    # Of the same seeds: Kahan's losses are replaced, the others stay.
    for run in found["runs"]:
        for stage in run["stages"]:
            stage["runs"] = {name: numbers for name, numbers in stage["runs"].items() if name in ("fp32", "kahan")}
            stage["runs"]["kahan"]["final"] = stage["runs"]["fp32"]["final"] + 0.5
    (tmp_path / "later.json").write_text(json.dumps({**found, "other_paths": []}), encoding="utf-8")
    assert main(["--join", str(written), str(tmp_path / "later.json")]) is None
    replaced = capsys.readouterr().out
    assert replaced.count("| +0.50000 ± 0.00000 |") == 2 and "over 2 seeds" in replaced
    (sr,) = (row for row in both.splitlines() if row.startswith("| fine-tuning | BF16 stochastic |"))
    assert sr.split("|")[-2] in replaced

    found["runs"][0]["stages"][0]["runs"]["fp32"]["final"] += 1e-3
    (tmp_path / "other.json").write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(SystemExit, match="FP32's losses for seed 0 differ"):
        main(["--join", str(written), str(tmp_path / "other.json")])


@pytest.mark.every_case
def test_further_ways_and_learning_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "VALIDATION_BLOCKS", 8)
    options = ["--steps", "1", "--seeds", "0", "--paths", "0", "--output-dir", str(tmp_path)]
    ways = ["fp32", "split-8bit", "sr-8bit"]
    written = main([*options, "--ways", ",".join(ways), "--rate-factor", "2"])
    assert written is not None
    assert "| fine-tuning | BF16 split, 8-bit states |" in capsys.readouterr().out
    found = json.loads(written.read_text(encoding="utf-8"))
    (run,) = found["runs"]
    assert list(run["ways"]) == ways
    assert [stage["settings"]["learning_rate"] for stage in run["stages"]] == [2e-3, 4e-5]
    bytes_each = [sum(run["stages"][0]["runs"][way]["bytes_per_parameter"].values()) for way in ways]
    # Weights, gradients, both states with a scale for 32 elements each, and what the mode adds; norms are few.
    assert bytes_each == pytest.approx([16, 8 + 1 / 16, 6 + 1 / 16], rel=0.02)
    (tmp_path / "slower.json").write_text(json.dumps({**found, "rate_factor": 1.0}), encoding="utf-8")
    with pytest.raises(SystemExit, match="the same learning rates"):
        main(["--join", str(written), str(tmp_path / "slower.json")])
