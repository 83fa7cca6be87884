"""Gradient release on several ranks: the bits of the ordinary step, whatever the wrapper, and freed gradients."""

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, "ddp-small_buckets,fsdp2"), (3, "fsdp2"), (4, "hsdp")],
)
def test_released_steps_are_the_ordinary_ones(ranks, kinds):
    """All kinds see the same batches on all ranks, so they have the bits of one process, and the same norms."""
    lines = [line.split() for line in run_ranks("gradient_release_on_ranks.py", ranks, kinds).splitlines() if line]
    assert [line[0] for line in lines] == kinds.split(",")
    for kind, ordinary, released, share, *norms in lines:
        assert released == ordinary, kind
        assert float(share) < (0.8 if "ddp" in kind else 0.5), kind  # under DDP, three of its buckets are in flight
        assert all(float(norm) > 0.25 for norm in norms) and len(norms) == 3, kind
    assert len({tuple(line[1:3]) for line in lines}) == len({tuple(line[4:]) for line in lines}) == 1
