"""FSDP2 through accelerate, for models of different structure and different orders of calls."""

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_ranks


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_weights_and_states_are_those_of_ddp():
    """On three ranks shards are uneven, and a sum in BF16 rounds twice. A case is one order of calls; the script
    describes each."""
    assert run_ranks("fsdp2_wraps.py", 3).count(": as DDP") == (17 if EVERY_CASE else 10)
