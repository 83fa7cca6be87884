"""DDP's gradients are the mean in rank order, on every rank, for worlds of 1 to 8 ranks."""

import pytest

from tests.support.processes.ranks import run_script


@pytest.mark.slow
@pytest.mark.distributed
def test_buckets_and_gradients_are_means_in_rank_order():
    printed = run_script("reduction_ddp.py", 1, 2, 3, 8)
    for ranks in (1, 2, 3, 8):
        assert f"11 cases agree on {ranks} ranks" in printed
