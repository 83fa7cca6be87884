"""FSDP2's gradients are the mean in rank order, whatever the shards; HSDP's the mean over replicas of FP32 sums."""

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_script


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_are_means_in_rank_order():
    worlds = (2, 3, 4) if EVERY_CASE else (3, 4)
    printed = run_script("reduction_fsdp2.py", *worlds)
    for ranks in worlds:
        assert f"FSDP2 agrees on {ranks} ranks" in printed


@pytest.mark.slow
@pytest.mark.distributed
def test_what_would_round_twice_is_refused():
    printed = run_script("reduction_refusals.py")
    assert printed.count("check_") == 8
