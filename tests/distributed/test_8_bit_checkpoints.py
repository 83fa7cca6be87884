"""States in 8 bits are saved by some ranks and loaded by others, bit for bit, with uneven shards."""

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = pytest.mark.distributed


def digest(ranks: int, task: str, format: str, folder) -> str:
    printed = run_ranks("reshard_8_bit_states.py", ranks, task, format, str(folder))
    return next(line for line in printed.splitlines() if line.startswith("digest"))


@pytest.mark.parametrize("format", ["dcp", "full"])
def test_four_ranks_save_and_others_go_on(format, tmp_path):
    expected = digest(4, "save", format, tmp_path)
    for ranks in {"dcp": (2, 1), "full": (3,)}[format]:
        assert digest(ranks, "resume", format, tmp_path) == expected
