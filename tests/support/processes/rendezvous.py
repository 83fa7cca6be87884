"""Let ranks wait for each other before they make their process group."""

import os
from datetime import timedelta

import torch.distributed as dist


def wait_for_imports() -> None:
    """Wait until all ranks have imported what they need.

    On a busy machine they finish at very different times, which must not count against a short timeout of the group.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(minutes=4))
    if store.add("imported", 1) == int(os.environ["WORLD_SIZE"]):
        store.set("all imported", "yes")
    store.wait(["all imported"])
