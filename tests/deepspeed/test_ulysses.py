"""Sequence parallelism under ZeRO: gradients are summed over the ranks that share a sequence."""

import pytest

from tests.support.processes.ranks import run_ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

BF16_HALF_ULP = 2**-9


@pytest.mark.parametrize(
    ("ranks", "stage"), [(4, 2), *(pytest.param(*case, marks=pytest.mark.every_case) for case in ((2, 2), (4, 3)))]
)
def test_the_norm_is_that_of_whole_sequences(ranks, stage):
    """A rank's gradient is rounded to BF16, and so is the mean: twice half an ulp of each element, at most."""
    found, expected = map(float, run_ranks("zero_ulysses.py", ranks, str(stage)).split())
    assert found == pytest.approx(expected, rel=2 * BF16_HALF_ULP)
