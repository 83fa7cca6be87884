"""Train the tiny Llama with Kahan summation and a checkpoint every two steps; kill the process after a step.

killed_in_step.py FOLDER STEP [KEY=VALUE of optim_args,…]
"""

import os
import signal
import sys

from transformers import TrainerCallback

import hf_lowprec  # noqa: F401
from hf_lowprec.optim.gradient_release import buckets as gradient_buckets
from tests.support.training.tiny_trainer import trained


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


gradient_buckets.BUCKET_ELEMENTS = 4000  # of 23,000
optim_args = sys.argv[3] if len(sys.argv) > 3 else None
saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
trained(sys.argv[1], callbacks=[Kill()], optim="adamw_bf16_kahan", optim_args=optim_args, **saving)
