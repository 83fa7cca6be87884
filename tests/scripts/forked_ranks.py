"""What torchrun does for the ranks of a script on this machine, but for starting them from nothing.

forked_ranks.py RANKS SCRIPT [ARGUMENTS...]
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from tests.support.processes.fork_ranks import fork_ranks

ranks, script = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def act(rank: int) -> None:
    """As a process that torchrun started, which keeps the store itself."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


with tempfile.TemporaryDirectory() as folder:
    sys.exit(fork_ranks(act, ranks, Path(folder)))
