"""Ranks are killed at random moments, mostly while they save; a resumed run ends with the same bits all the same.

`HF_LOWPREC_KILLS=20 HF_LOWPREC_SEED=7 pytest -s tests/distributed/test_chaos.py` kills more often.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from hf_lowprec.integrations.transformers.checkpoints.resume import last_complete, resolve
from tests.support.processes import forkserver
from tests.support.processes.ranks import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

KILLS = int(os.environ.get("HF_LOWPREC_KILLS", "1"))
SEED = int(os.environ.get("HF_LOWPREC_SEED", "1"))
NEVER = (0, 99, 0.0)
RANKS, SAVING = 2, 0.15
"""Most seconds that a save takes on a busy machine."""


def fsdp2(state_dict_type: str) -> list[str]:
    return ["fsdp2", "--fsdp_config", json.dumps({"version": 2, "state_dict_type": state_dict_type})]


WRAPPED = {"ddp": ["ddp"], "sharded": fsdp2("SHARDED_STATE_DICT"), "full": fsdp2("FULL_STATE_DICT")}
OPTIM = {"ddp": "adamw_bf16_kahan", "sharded": "adamw_bf16_split", "full": "adamw_bf16_kahan"}


def train(out: Path, wrapped: str, killed: tuple[int, int, float]) -> forkserver.Done:
    """Train in `out`, from the last intact checkpoint if there is one."""
    words = "--max_steps 8 --save_strategy steps --save_steps 2 --learning_rate 1e-2"
    words += f" --optim {OPTIM[wrapped]}"
    words += f" --per_device_train_batch_size 2 --output_dir {out}"
    if last_complete(out) is not None:
        words += " --resume_from_checkpoint True"
    arguments = [RANKS, SCRIPTS / "killed_at.py", *killed, *WRAPPED[wrapped], *words.split()]
    return forkserver.run(SCRIPTS / "forked_ranks.py", [str(word) for word in arguments], timeout=120)


def digest(done: forkserver.Done) -> str:
    return next(line for line in done.stdout.splitlines() if line.startswith("digest="))


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_nothing_is_lost_by_kills(wrapped, tmp_path):
    whole = train(tmp_path / "whole", wrapped, NEVER)
    assert whole.returncode == 0, whole.stderr[-4000:]
    out, moments = tmp_path / "killed", random.Random(SEED)
    kills = 0
    while kills < KILLS:
        save = moments.choice([0, 1, 1, 2, 2, 3])
        at = (moments.randrange(RANKS), save, moments.uniform(0, SAVING if save else 1))
        done = train(out, wrapped, at)
        found = {path.name: is_good(path) for path in sorted(out.glob("checkpoint-*"))}
        print(f"kill {kills + 1} at {at}: {'died' if done.returncode else 'ended'}, {found}")
        if done.returncode == 0:  # it had saved less often than that, or was faster
            assert digest(done) == digest(whole)
            shutil.rmtree(out)
            continue
        story = done.stdout + done.stderr
        (end,) = re.findall(rf"rank {at[0]} of {RANKS} failed\n(\w*)", story)
        assert end in ("", "rank"), story[-6000:]  # by the kill, not by an exception of its own
        kills += 1
    last = train(out, wrapped, NEVER)
    assert last.returncode == 0, last.stderr[-4000:]
    assert digest(last) == digest(whole)


def is_good(checkpoint: Path) -> bool:
    """Whether a checkpoint can be resumed from; if not, our error says so."""
    try:
        return resolve(str(checkpoint), str(checkpoint.parent)) == str(checkpoint)
    except ValueError as error:
        assert f"{checkpoint.name}' was not finished: " in str(error)
        return False
