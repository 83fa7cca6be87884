"""Ranks are killed, mostly while they save; a resumed run ends with the same bits all the same.

`HF_LOWPREC_KILLS=20 HF_LOWPREC_SEED=7 pytest -s tests/distributed/test_chaos.py` kills more often.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from hf_lowprec.integrations.transformers.checkpoints.manifest import examine
from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.support.processes import forkserver
from tests.support.processes.ranks import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

KILLS = int(os.environ.get("HF_LOWPREC_KILLS", "1"))
SEED = int(os.environ.get("HF_LOWPREC_SEED", "9"))  # kills in the second save, so that the first is resumed from
NEVER = (0, 99, 0.0)
BEFORE_ITS_RANDOM_STATE, BEFORE_ON_SAVE = (1, 2, "random_state"), (0, 2, "on_save")
"""Rank 1 in the checkpoint of step 4; and rank 0 when it saves for the second time after that."""
SAVING = 0.15
"""Most seconds that a save of two ranks takes on a busy machine."""


def fsdp2(state_dict_type: str) -> list[str]:
    return ["fsdp2", "--fsdp_config", json.dumps({"version": 2, "state_dict_type": state_dict_type})]


WRAPPED = {"sharded": fsdp2("SHARDED_STATE_DICT"), "full": fsdp2("FULL_STATE_DICT")}
IN_8_BITS, RELEASED, DELAYED = "state_dtype=int8", "gradient_release=True", "clip=delayed"
MODES = [
    ("sharded", "adamw_bf16_split", [IN_8_BITS]),
    ("ddp", "adamw_bf16_kahan", [IN_8_BITS, RELEASED, DELAYED]),
    ("full", "adamw_bf16_kahan", []),
    ("ddp", "adamw_bf16_split", []),
    ("ddp", "adamw_bf16_sr", [IN_8_BITS]),
    ("sharded", "adamw_bf16_kahan", [IN_8_BITS]),
    ("full", "adamw_bf16_split", [RELEASED]),
    ("sharded", "adamw_bf16_split", [RELEASED, DELAYED]),
    ("sharded", "adafactor_bf16_split", ["beta1=0.9", IN_8_BITS]),
    ("sharded", "adamw_bf16_sr", ["factored=True", IN_8_BITS]),
    ("full", "adafactor_bf16_sr", [RELEASED, DELAYED]),
    ("ddp", "adafactor_bf16_kahan", []),
    ("sharded", "muon_bf16_split", []),
    ("ddp", "muon_bf16_sr", []),
]
SHARDED_AT_LOAD = [
    ("llama:fsdp_size=2,tp_size=2", "adamw_bf16_split", [IN_8_BITS]),
    ("moe:fsdp_size=4,ep_size=2", "adamw_bf16_kahan", []),  # the experts: EP 2 x FSDP2 2
]


def ranks_of(mode: tuple[str, str, list[str]]) -> int:
    return 4 if mode in SHARDED_AT_LOAD else 2


def train(
    out: Path, mode: tuple[str, str, list[str]], killed: tuple[int, int, float | str], *more: str
) -> forkserver.Done:
    """Train in `out`, from the newest whole checkpoint if there is one."""
    wrapped, optim, options = mode
    words = f"--max_steps 8 --save_strategy steps --save_steps 2 --learning_rate 1e-2 --optim {optim}"
    words += f" --per_device_train_batch_size 2 --output_dir {out}"
    words += f" --optim_args {','.join(options)}" if options else ""
    if RELEASED in options:
        words += f" --max_grad_norm {0.5 if DELAYED in options else 0}"
    if any(map(is_good, out.glob("checkpoint-*"))):
        words += " --resume_from_checkpoint True"
    arguments = [
        ranks_of(mode),
        SCRIPTS / "killed_at.py",
        *killed,
        *WRAPPED.get(wrapped, [wrapped]),
        *words.split(),
        *more,
    ]
    settings = {"HIDDEN_SIZE": "64", "BUCKET_ELEMENTS": "4000"}
    return forkserver.run(SCRIPTS / "forked_ranks.py", [str(word) for word in arguments], timeout=120, **settings)


def digest(done: forkserver.Done) -> str:
    return next(line for line in done.stdout.splitlines() if line.startswith("digest="))


@pytest.mark.every_case
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: ",".join([*mode[:2], *mode[2]]))
def test_nothing_is_lost_by_kills(mode, tmp_path):
    lose_nothing(mode, tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize("mode", SHARDED_AT_LOAD, ids=lambda mode: mode[0])
def test_nothing_is_lost_by_kills_of_models_sharded_at_load(mode, tmp_path):
    lose_nothing(mode, tmp_path, max(KILLS, 10))


def lose_nothing(mode: tuple[str, str, list[str]], tmp_path: Path, count: int = KILLS) -> None:
    """Train as a whole, and with `count` kills of one rank or all and resumes; compare the ends."""
    whole = train(tmp_path / "whole", mode, NEVER)
    assert whole.returncode == 0, whole.stderr[-4000:]
    out, moments = tmp_path / "killed", random.Random(SEED)
    kills, ranks = 0, ranks_of(mode)
    while kills < count:
        save = moments.choice([0, 1, 1, 2, 2, 3])
        at = (moments.randrange(-1, ranks), save, moments.uniform(0, SAVING * ranks / 2 if save else 1))
        done = train(out, mode, at)
        found = {path.name: is_good(path) for path in sorted(out.glob("checkpoint-*"))}
        print(f"kill {kills + 1} at {at}: {'died' if done.returncode else 'ended'}, {found}")
        if done.returncode == 0:  # it had saved less often than that, or was faster
            assert digest(done) == digest(whole)
            shutil.rmtree(out)
            continue
        story = done.stdout + done.stderr
        killed = at[0] if at[0] >= 0 else r"\d"
        ends = re.findall(rf"rank {killed} of {ranks} failed\n(\w*)", story)
        by_kill = {"", "rank"} & {*ends} if at[0] < 0 else {*ends} <= {"", "rank"}  # of all, the first takes the others
        assert ends and by_kill, story[-9000:]
        kills += 1
    last = train(out, mode, NEVER)
    assert last.returncode == 0, last.stderr[-4000:]
    assert digest(last) == digest(whole)


def test_kills_between_the_files_of_two_ranks_and_after_the_manifest(tmp_path):
    """Only rank 1's random state is missing, and the older checkpoint is still there; then nothing is missing."""
    mode, out, limit = MODES[3], tmp_path / "killed", ("--save_total_limit", "1")
    whole = train(tmp_path / "whole", mode, NEVER)
    assert train(out, mode, BEFORE_ITS_RANDOM_STATE, *limit).returncode != 0
    assert (out / "checkpoint-4/trainer_state.json").exists()
    assert examine(out / "checkpoint-4").problems == ["saving was not finished"]
    assert choose_checkpoint(True, str(out)) == str(out / "checkpoint-2")
    assert train(out, mode, BEFORE_ON_SAVE, *limit).returncode != 0  # it resumed from step 2, so it saved step 6
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-6"]
    assert choose_checkpoint(True, str(out)) == str(out / "checkpoint-6")
    assert digest(train(out, mode, NEVER, *limit)) == digest(whole)


def is_good(checkpoint: Path) -> bool:
    """Whether a checkpoint can be resumed from; if not, our error says so."""
    try:
        return choose_checkpoint(str(checkpoint), str(checkpoint.parent)) == str(checkpoint)
    except ValueError as error:
        assert f"{checkpoint.name}' is not a complete checkpoint: saving was not finished" in str(error)
        return False
