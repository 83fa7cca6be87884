"""Reading checkpoints on two ranks, where it fails on one of them: both raise, and neither waits for the other.

unreadable_checkpoints.py FOLDER: with good checkpoints, the last of step 4.
"""

import os
import sys
from pathlib import Path

from accelerate import PartialState

from hf_lowprec.integrations.transformers.checkpoints import damage as checkpoint_damage
from hf_lowprec.integrations.transformers.checkpoints import resume as resume_from_checkpoint
from hf_lowprec.integrations.transformers.checkpoints.resume import check_best, choose_checkpoint

RANK = int(os.environ["RANK"])
FOLDER = sys.argv[1]


def complaint(act, *arguments: object) -> str:
    try:
        act(*arguments)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing_on(rank: int, original):
    def read(*arguments):
        if rank == RANK:
            raise PermissionError("no permission for this file")
        return original(*arguments)

    return read


def check() -> None:
    os.environ["LOCAL_RANK"] = "0"  # machines of one rank each
    PartialState(cpu=True)
    good = str(Path(FOLDER) / "checkpoint-4")
    assert choose_checkpoint(True, FOLDER) == good
    read, found = resume_from_checkpoint.read_manifest, checkpoint_damage.damaged_files
    resume_from_checkpoint.read_manifest = failing_on(0, read)
    told = "ValueError: rank 0 cannot read the checkpoints: PermissionError: no permission for this file"
    for act, *arguments in [
        (choose_checkpoint, True, FOLDER),
        (choose_checkpoint, good, FOLDER),
        (check_best, Path(good)),
    ]:
        assert complaint(act, *arguments) == told, (RANK, act, complaint(act, *arguments))
    resume_from_checkpoint.read_manifest = read

    checkpoint_damage.damaged_files = failing_on(1, found)
    told = told.replace("rank 0", "rank 1")
    assert complaint(choose_checkpoint, good, FOLDER) == told
    checkpoint_damage.damaged_files = found

    candidates, called = resume_from_checkpoint._candidates, []
    resume_from_checkpoint._candidates = lambda folder: (called.append(folder), candidates(folder))[1]
    assert choose_checkpoint(True, FOLDER) == good
    assert len(called) == (RANK == 0), "one rank reads every manifest"


def check_a_lost_rank() -> None:
    if RANK == 1:
        os._exit(0)
    found = complaint(choose_checkpoint, True, FOLDER)
    assert found.startswith("RuntimeError: rank 0 of 2 lost another rank while choosing a checkpoint"), found


if __name__ == "__main__":
    check()
    check_a_lost_rank()
    print("both ranks raise", flush=True)
    os._exit(0)
