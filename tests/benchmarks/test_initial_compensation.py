"""The benchmark of the initial compensation: its arithmetic, and all of it once on tiny sizes."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("datasets")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

from first_steps.costs import memory, step_time_ratios, tensor_bytes  # noqa: E402
from first_steps.stored_displacement import shares  # noqa: E402
from first_steps.training import Run, distances  # noqa: E402
from initial_compensation import differences, main, with_error  # noqa: E402


def test_a_zero_compensation_lags_and_others_do_not() -> None:
    found = shares(2e-5, (1, 3), 20_000, seed=0)
    # After one step of 2e-5 about 1 in 6 weights has a spacing below 4e-5, and moves.
    assert found["zero"][1] < 0.6
    # An update is about 1/3 of a spacing or less, so some 3000 of 20000 weights move by a spacing: noise of 2%.
    for name in ("low_bits", "dither", "stochastic"):
        assert found[name][1] == pytest.approx(1, abs=0.1)


def test_differences_are_paired_by_seed() -> None:
    results = [
        {"task": "t", "rate": 1e-6, "seed": seed, "optimizer": name, "losses": {1: loss}}
        for seed, name, loss in ((0, "FP32", 2.0), (1, "FP32", 3.0), (1, "zero", 3.5), (0, "zero", 2.25))
    ]
    assert sorted(differences(results, "t", 1e-6, "zero", 1)) == [0.25, 0.5]
    assert with_error([0.25, 0.75], "+.2f") == "+0.50 ± 0.25"  # deviation 0.354, by √2
    assert with_error([0.25], "+.2f") == "+0.25"


def test_distances_are_in_units_of_the_displacement() -> None:
    start, end = torch.zeros(2), torch.tensor([3.0, 4.0])
    reference = Run({}, start, end, end)
    run = Run({}, start, stored=torch.zeros(2), estimate=torch.tensor([3.0, 3.0]))
    assert distances(run, reference) == pytest.approx({"estimate": 0.2, "stored": 1})


def test_shared_memory_is_counted_once() -> None:
    before = tensor_bytes()
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    view = tensor[10:]
    assert tensor_bytes() - before == tensor.nbytes
    assert len(view) == 990


def test_low_bits_are_gone_after_the_first_step() -> None:
    left = {name: memory(1, name)["left"] for name in ("zero", "low_bits", "dither")}
    assert left["zero"] == left["low_bits"] == left["dither"]
    ratios = step_time_ratios(rounds=2, elements=1000)
    assert ratios.keys() == {"low_bits", "dither"} and min(ratios.values()) > 0


@pytest.mark.every_case
@pytest.mark.slow
def test_everything_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--elements", "1000", "--seeds", "0", "--rates", "2e-5", "--steps", "2", "--validation", "8"]
    models = ["--encoder-steps", "2", "--hidden", "32", "--llama-steps", "2"]
    folders = ["--work", str(tmp_path), "--output-dir", str(tmp_path)]
    files = main(["--parts", "shares,training", *sizes, *models, *folders])
    shown, training = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    assert "byte-level Llama, lr 2e-05, 1 seeds" in capsys.readouterr().out
    assert set(shown["shares"]) == {"1e-06", "2e-06", "2e-05", "0.0001", "0.001"}
    assert len(training["runs"]) == 15  # 3 tasks, 5 optimizers
    for run in training["runs"]:
        if run["optimizer"] == "FP32":
            assert run["distances"] == {"estimate": 0, "stored": 0}
        if run["optimizer"] == "low_bits":
            # The compensation has 8 bits below the weight's 8; 2 steps of 2e-5 move a weight by 0.3 spacings.
            assert run["distances"]["estimate"] < 0.2
