"""Kill a rank of a training under FSDP2 at random moments, resume, and compare the end with an undisturbed run.

fsdp2_kills.py [--kills 20] [--seed 0] [--state SHARDED_STATE_DICT|FULL_STATE_DICT]

Two ranks, a checkpoint every step, all but the last two of which are deleted. A training that has come to its end is
followed by another one, until there were as many kills as asked for.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed as dist

from tests.forked import fork_ranks
from tests.scripts import trainer_ranks

RANKS, STEPS = 2, 10
NOTHING_TO_RESUME = "start again without resume_from_checkpoint"
"""What a run is told that finds no finished checkpoint."""


def train(out: Path, state: str, resume: bool, victim: int = -1, after: float = 0.0) -> tuple[str, str | None]:
    """What the ranks print and, if one of them fails, how; rank `victim` is killed `after` so many seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = (
        f"--output_dir {out} --optim adamw_bf16_kahan --max_steps {STEPS} --learning_rate 1e-2 --save_strategy steps"
    )
    words += " --per_device_train_batch_size 2 --save_steps 1 --save_total_limit 2"
    fsdp = json.dumps({"version": 2, "state_dict_type": state})
    asked = ["--resume_from_checkpoint", "True"] if resume else []

    def act(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in place.items()})
        printed = os.open(f"{folder}/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        if rank == victim:
            timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        trainer_ranks.main("fsdp2", *words.split(), "--fsdp_config", fsdp, *asked)

    with tempfile.TemporaryDirectory() as folder:
        failure = fork_ranks(act, RANKS, Path(folder))
        return Path(folder, "printed").read_text(), failure


def digest(printed: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith("digest="))


def main(kills: int, seed: int, state: str) -> None:
    chance, killed, trained = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        begin = time.monotonic()
        printed, failure = train(Path(folder, "whole"), state, resume=False)
        assert failure is None, failure + printed
        expected, seconds = digest(printed), time.monotonic() - begin - 1  # it waits for a second at its end
        ended = False
        while killed < kills or not ended:
            last = out / f"checkpoint-{STEPS}"
            undisturbed = killed == kills or last.exists()
            if last.exists():
                shutil.rmtree(last)  # Trainer takes a step more than it was asked for if it resumes from the last one
            resume = any(out.glob("checkpoint-*"))
            victim, after = chance.randrange(RANKS), chance.uniform(0, seconds)
            printed, failure = train(out, state, resume, -1 if undisturbed else victim, after)
            ended = failure is None
            if ended:
                assert digest(printed) == expected, "the weights or states of a run that was resumed differ"
                trained += 1
                shutil.rmtree(out)
            elif NOTHING_TO_RESUME in str(failure):
                shutil.rmtree(out)
            elif re.search(rf"rank {victim} of {RANKS} failed\n(\n|$)", str(failure)):  # without a traceback
                killed += 1
                left = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
                names = ", ".join(path.name for path in left) or "nothing"
                print(f"kill {killed}: rank {victim} after {after:.2f} s, which leaves {names}", flush=True)
            else:
                raise AssertionError(failure + printed)
    print(f"{killed} kills, {trained} trainings that came to the same end ({state})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", default="SHARDED_STATE_DICT", choices=["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
    asked = parser.parse_args()
    main(asked.kills, asked.seed, asked.state)
    sys.exit(0)
