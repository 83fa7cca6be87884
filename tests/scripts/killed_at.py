"""`trainer_ranks.py` in which one rank is killed: SECONDS after its SAVE-th checkpoint was begun, or training for 0.

killed_at.py RANK SAVE SECONDS [ARGUMENTS of trainer_ranks.py...]
"""

import os
import signal
import sys
import threading

from trainer_ranks import main
from transformers import Trainer, TrainerCallback

rank, save, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
begun = 0


def die_later() -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


class Begin(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if args.process_index == rank and save == 0:
            die_later()


def build(self, *args, callbacks=(), **kwargs):
    original_build(self, *args, callbacks=[*callbacks, Begin()], **kwargs)


def save_checkpoint(self, *args, **kwargs):
    global begun
    begun += 1
    if self.args.process_index == rank and begun == save:
        die_later()
    original_save(self, *args, **kwargs)


original_build, Trainer.__init__ = Trainer.__init__, build
original_save, Trainer._save_checkpoint = Trainer._save_checkpoint, save_checkpoint
main(*sys.argv[4:])
