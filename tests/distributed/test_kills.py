"""Ranks that are killed at random moments under FSDP2; by hand with more of them: `tests/scripts/fsdp2_kills.py`."""

import re

import pytest

from tests.ranks import run_script


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("state", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_resumed_training_ends_as_an_undisturbed_one(state):
    printed = run_script("fsdp2_kills.py", "--kills", 1, "--seed", 1, "--state", state)
    assert re.search(rf"1 kills, [1-9]\d* trainings that came to the same end \({state}\)", printed)
