"""Run a script, or a function of a module, on several ranks of this machine as torchrun does; but fork the ranks.

forked_ranks.py RANKS SCRIPT [ARGUMENTS...]
forked_ranks.py RANKS MODULE:FUNCTION [ARGUMENTS and FILE for the result of rank 0, both in JSON]
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.processes.fork_ranks import fork_ranks
from tests.support.processes.ranks import leave

ranks, program, *words = int(sys.argv[1]), *sys.argv[2:]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
module, _, name = program.partition(":")
function = getattr(importlib.import_module(module), name) if name else None  # imported once, before the fork


def act(rank: int) -> None:
    """Be what torchrun starts: torchrun's agent keeps the store, so no rank does."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = [program, *words]
    if function is None:
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        return
    arguments, file = words or ("[]", os.devnull)
    result = function(*json.loads(arguments))
    if rank == 0:
        Path(file).write_text(json.dumps(result))
    leave()


sys.exit(fork_ranks(act, ranks))
