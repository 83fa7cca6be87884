"""`trainer_ranks.py` in which one rank is killed at its SAVE-th checkpoint, or while it trains for 0.

killed_at.py RANK SAVE WHEN [ARGUMENTS of trainer_ranks.py...]

RANK -1 stands for all of them. WHEN is a number of seconds after the checkpoint was begun; or "random_state", before
the rank writes its own and when rank 0 has written all that it writes; or "on_save", when Trainer has written all.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from trainer_ranks import main
from transformers import Trainer, TrainerCallback

rank, save, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"]) if rank < 0 else rank
begun = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later() -> None:
    threading.Timer(float(when), die).start()


class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if args.process_index == rank and save == 0:
            die_later()

    def on_save(self, args, state, control, **kwargs):
        if args.process_index == rank and begun == save and when == "on_save":
            die()


def build(self, *args, callbacks=(), **kwargs):
    original_build(self, *args, callbacks=[*callbacks, Watch()], **kwargs)


def save_checkpoint(self, *args, **kwargs):
    global begun
    begun += 1
    if self.args.process_index == rank and begun == save and when not in ("random_state", "on_save"):
        die_later()
    original_save(self, *args, **kwargs)


def save_random_state(self, output_dir):
    if self.args.process_index == rank and begun == save and when == "random_state":
        while not Path(output_dir, "trainer_state.json").exists():
            time.sleep(0.01)
        time.sleep(0.5)  # until it is written to the end
        die()
    original_save_random_state(self, output_dir)


original_build, Trainer.__init__ = Trainer.__init__, build
original_save, Trainer._save_checkpoint = Trainer._save_checkpoint, save_checkpoint
original_save_random_state, Trainer._save_rng_state = Trainer._save_rng_state, save_random_state
main(*sys.argv[4:])
