"""DeepSpeed's engine around our optimizers: its steps, checkpoints and long sequences; ranks that die or are killed."""

import sys

import pytest

from tests.distributed.test_chaos import IN_8_BITS, lose_nothing
from tests.distributed.test_lost_ranks import check_death
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


@pytest.mark.timeout(400)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are watched through /proc")
@pytest.mark.parametrize("kind", [pytest.param("zero2", marks=pytest.mark.every_case), "zero3"])
def test_a_rank_dies(processes, store, kind):
    """In the middle of a backward pass: the others end with an error, they do not hang."""
    check_death(processes, store, kind)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "optim", "options"),
    [
        ("zero1", "adamw_bf16_split", []),
        ("zero2", "adamw_bf16_kahan", [IN_8_BITS]),
        ("zero3", "adamw_bf16_split", []),
    ],
)
def test_nothing_is_lost_by_kills(kind, optim, options, tmp_path):
    """Mostly while ranks save; a resumed run ends with the same bits all the same."""
    lose_nothing((kind, optim, options), tmp_path)
