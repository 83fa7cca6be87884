from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.support.processes.watched import Processes


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def store():
    """The store where ranks meet. This process keeps it, as a launcher would, so it survives every rank."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
