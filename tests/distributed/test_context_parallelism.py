"""Context parallelism through accelerate: FSDP2 over the ranks of all sequences and of their parts."""

import pytest

from tests.support.processes.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_are_summed_over_the_parts_of_a_sequence():
    assert "context parallelism agrees" in run_ranks("context_parallelism.py", 4)
