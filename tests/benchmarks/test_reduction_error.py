"""The additions that the error table simulates, by hand; and its rows over real processes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.reduction_error import OURS, OURS_FP32, error, growth, ring, tree
from tests.support.processes import forkserver

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "reduction_error.py"


def versions(*ranks: list[float], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.tensor(ranks, dtype=dtype)


def test_a_ring_rounds_at_each_hop_in_its_order():
    # From 256 on BF16 has even numbers only, and a tie goes to the multiple of four: 256 + 1 = 256, 258 + 1 = 260.
    # Piece 0 is added up in the order of ranks 1, 2, 0: (1 + 1) + 256; piece 1 in that of 2, 0, 1; piece 2 in 0, 1, 2.
    gradients = versions([256, 256, 258], [1, 1, 1], [1, 1, 1])
    assert ring(gradients).tolist() == [258, 256, 260]
    assert ring(gradients.float()).tolist() == [258, 258, 260]


def test_a_ring_of_more_than_one_element_per_piece():
    gradients = versions([256, 258, 3, 256], [1, 1, 1, 1])
    # One addition each, so only which elements meet can be wrong.
    assert ring(gradients).tolist() == [256, 260, 4, 256]


def test_a_tree_rounds_at_each_node():
    gradients = versions([256.0], [1], [1], [1])
    assert tree(gradients).tolist() == [258]  # (256 + 1) + (1 + 1)
    # Rank 0 is added last to piece 0, then one earlier for each piece.
    assert ring(gradients.repeat(1, 4)).tolist() == [260, 260, 256, 256]


def test_errors_are_relative_to_the_norm_of_the_exact_mean():
    found = error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert found["relative"] == pytest.approx(1 / 5)
    assert found["mean"] == pytest.approx(0.5 / 12.5**0.5)
    assert found["max"] == pytest.approx(1 / 12.5**0.5)


def test_growth_is_the_exponent():
    assert growth({n: {"relative": 3 * n**0.5} for n in (2, 8, 512)}) == pytest.approx(0.5)
    assert growth({2: {"relative": 0.0}, 4: {"relative": 1e-9}}) is None


@pytest.mark.every_case
@pytest.mark.distributed
def test_the_table_has_real_and_simulated_rows_that_agree(tmp_path):
    output = tmp_path / "result.json"
    options = ["--ranks", "2,64", "--processes", "2", "--signals", "1", "--elements", "4096", "--output", str(output)]
    done = forkserver.run(SCRIPT, options, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FP32 sums, circulated" in done.stdout
    (found,) = json.loads(output.read_text())["signals"].values()
    real, simulated = ({row["way"]: row["errors"] for row in found[where]} for where in ("gloo", "simulated"))
    # Two ranks add once, in whichever order.
    for way in ("BF16 all-reduce", "BF16 reduce-scatter"):
        assert real[way]["2"] == simulated["BF16 ring"]["2"]
    for way in (OURS, OURS_FP32):
        assert real[way]["2"] == simulated[way]["2"]
    at_64 = {way: errors["64"]["relative"] for way, errors in simulated.items()}
    floor = next(value for way, value in at_64.items() if "floor" in way)
    assert at_64[OURS] == pytest.approx(floor, rel=1e-3)
    assert at_64["BF16 ring"] > 3 * floor
    assert at_64[OURS_FP32] < 1e-7
