"""Run a script on several ranks of this machine as torchrun does, but fork the ranks, which saves their imports.

forked_ranks.py RANKS SCRIPT [ARGUMENTS...]
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.processes.fork_ranks import fork_ranks

ranks, script = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def act(rank: int) -> None:
    """Be what torchrun starts: torchrun's agent keeps the store, so no rank does."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


sys.exit(fork_ranks(act, ranks))
