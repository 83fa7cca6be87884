"""Sharded and replicated training resumes bit for bit, also with another number of processes."""

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.every_case]


def digest(ranks: int, kind: str, rounding: str, *task: str) -> str:
    printed = run_ranks("same_batches.py", ranks, kind, rounding, *task)
    return next(line.split()[2] for line in printed.splitlines() if line.startswith(f"{kind} {rounding} "))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of checkpoints that four ranks wrote halfway, with the digest of their weights at the end."""
    folders: dict[tuple[str, str], tuple[str, str]] = {}

    def save(format: str, rounding: str) -> tuple[str, str]:
        if (format, rounding) not in folders:
            folder = str(tmp_path_factory.mktemp(format))
            folders[format, rounding] = (folder, digest(4, "fsdp2", rounding, "save", format, folder))
        return folders[format, rounding]

    return save


# "dcp" is torch.distributed.checkpoint by itself, "sharded" and "full" are accelerator.save_state.
@pytest.mark.parametrize(
    ("format", "ranks", "kind", "rounding"),
    [
        ("dcp", 2, "fsdp2", "kahan"),
        ("dcp", 1, "ddp", "kahan"),
        ("dcp", 2, "fsdp2-states_on_host", "split"),
        ("full", 2, "fsdp2", "kahan"),
        ("full", 2, "fsdp2", "split"),
        ("dcp", 3, "fsdp2", "kahan"),
        ("sharded", 3, "fsdp2", "kahan"),
        ("sharded", 3, "fsdp2", "split"),
    ],
)
def test_four_ranks_save_and_others_go_on(saved, format, ranks, kind, rounding):
    folder, expected = saved(format, rounding)
    assert digest(ranks, kind, rounding, "resume", format, folder) == expected


def test_ddp_saves_and_goes_on(tmp_path):
    expected = digest(2, "ddp", "stochastic", "save", "full", str(tmp_path))
    assert digest(2, "ddp", "stochastic", "resume", "full", str(tmp_path)) == expected
