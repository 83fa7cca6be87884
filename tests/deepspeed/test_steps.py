"""ZeRO 1, 2 and 3 step parts of parameters; together they have the bits of one process."""

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_script

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize("ranks", ["2", "3", "4", "8"] if EVERY_CASE else ["2", "3"])
def test_weights_states_and_norms_are_those_of_one_process(ranks):
    """Optimizers, roundings, states, models, param groups, frozen parameters, buckets, accumulation, clipping."""
    assert "cases agree" in run_script("zero_steps.py", ranks)
