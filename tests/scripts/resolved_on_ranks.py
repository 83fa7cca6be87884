"""What each rank is told to resume from, where every rank is a machine with files of its own.

resolved_on_ranks.py FOLDER ASKED...: rank R runs in FOLDER/R, and asks for the R-th of ASKED, or the last.
"""

import os
import sys

from accelerate import PartialState

from hf_lowprec.integrations.checkpoints import resolve
from tests.ranks import leave

rank, asked = int(os.environ["RANK"]), sys.argv[2:]
os.environ["LOCAL_RANK"] = "0"
os.chdir(os.path.join(sys.argv[1], str(rank)))
PartialState(cpu=True)
name = asked[min(rank, len(asked) - 1)]
try:
    found = resolve(True if name == "True" else name, "out")
except ValueError as error:
    found = f"ValueError: {error}"
print(f"rank {rank}: {found}", flush=True)
leave()
