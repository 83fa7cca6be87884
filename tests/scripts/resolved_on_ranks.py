"""What each rank is told to resume from, where every rank is a machine with files of its own.

resolved_on_ranks.py QUESTIONS: in JSON, a list of [FOLDER, ASKED, ...]; rank R runs in FOLDER/R, and asks for the R-th
or the last of what follows.
"""

import json
import os
import sys

from accelerate import PartialState

from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.support.processes.ranks import leave

rank = int(os.environ["RANK"])
os.environ["LOCAL_RANK"] = "0"
PartialState(cpu=True)
for number, (folder, *asked) in enumerate(json.loads(sys.argv[1])):
    os.chdir(os.path.join(folder, str(rank)))
    try:
        found = choose_checkpoint(asked[min(rank, len(asked) - 1)], "out")
    except ValueError as error:
        found = f"ValueError: {error}"
    print(f"answer {number} of rank {rank}: {found}\n", end="", flush=True)
leave()
