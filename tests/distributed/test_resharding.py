"""Checkpoints go from some ranks to others, bit for bit, with uneven shards."""

import pytest

from tests.support.processes.ranks import run_script

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("format", ["dcp", pytest.param("full", marks=pytest.mark.every_case)])
def test_other_numbers_of_ranks_go_on(format, tmp_path):
    assert "ranks end with the bits of one process" in run_script("resharded_states.py", format, str(tmp_path))
