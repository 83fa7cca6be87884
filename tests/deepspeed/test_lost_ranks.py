"""A rank that dies in the middle of a backward pass under ZeRO: the others end with an error, they do not hang."""

import pytest

from tests.distributed.test_lost_ranks import check_death, pytestmark  # noqa: F401

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("kind", [pytest.param("zero2", marks=pytest.mark.every_case), "zero3"])
def test_a_rank_dies(processes, store, kind):
    check_death(processes, store, kind)
