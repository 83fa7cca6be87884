"""NaN or infinity in one gradient element of one rank: it reaches every rank, and every rank skips the step."""

import pytest

from tests.support.processes.ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_one_rank_is_not_finite(kind):
    assert f"{kind}: 5 values in 2 places were skipped" in run_ranks("distributed_nonfinite.py", 2, kind)
