"""DeepSpeed's engine around our optimizers in an own loop: its steps, checkpoints and long sequences."""

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_ranks, run_script

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_checkpoints_and_nonfinite_gradients(tmp_path):
    """Runs resume bit for bit, DeepSpeed's tools find all bits of FP32 weights, other checkpoints are refused, NaN on
    one rank stops all."""
    assert "all checks passed" in run_script("zero_engine.py", tmp_path)


@pytest.mark.parametrize("ranks", ["2", "3", "4", "8"] if EVERY_CASE else ["2", "3"])
def test_weights_states_and_norms_are_those_of_one_process(ranks):
    """Optimizers, roundings, states, models, param groups, frozen parameters, buckets, accumulation, clipping."""
    assert "cases agree" in run_script("zero_steps.py", ranks)


BF16_HALF_ULP = 2**-9


@pytest.mark.parametrize(
    ("ranks", "stage"), [(4, 2), *(pytest.param(*case, marks=pytest.mark.every_case) for case in ((2, 2), (4, 3)))]
)
def test_the_norm_is_that_of_whole_sequences(ranks, stage):
    """A rank's gradient is rounded to BF16, and so is the mean: twice half an ulp of each element, at most."""
    found, expected = map(float, run_ranks("zero_ulysses.py", ranks, str(stage)).split())
    assert found == pytest.approx(expected, rel=2 * BF16_HALF_ULP)
