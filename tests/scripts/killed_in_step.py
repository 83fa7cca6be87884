"""Train the tiny Llama with Kahan summation and a checkpoint every two steps; kill the process after a step.

killed_in_step.py FOLDER STEP
"""

import os
import signal
import sys

from transformers import TrainerCallback

import hf_lowprec  # noqa: F401
from tests.support.training.tiny_trainer import trained


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


trained(sys.argv[1], callbacks=[Kill()], optim="adamw_bf16_kahan", save_strategy="steps", save_steps=2, max_steps=6)
