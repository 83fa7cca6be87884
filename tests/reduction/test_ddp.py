"""DDP's gradients are the mean in rank order, on every rank, for worlds of 1 to 8 ranks."""

import pytest

from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import run_script


@pytest.mark.slow
@pytest.mark.distributed
def test_buckets_and_gradients_are_means_in_rank_order():
    worlds = (1, 2, 3, 8) if EVERY_CASE else (3,)
    printed = run_script("reduction_ddp.py", *worlds)
    for ranks in worlds:
        assert f"11 cases agree on {ranks} ranks" in printed
