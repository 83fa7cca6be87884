"""Run hf_lowprec's command line (argv[4:]) in training whose network is cut in the middle of step argv[1].

The process group's timeout is argv[2] seconds: `TrainingArguments(ddp_timeout=…)` would be the way to say so, but
transformers drops it with `use_cpu`. The first rank of the second of two machines stops between forward and backward
and makes the file "in step" in the folder argv[3], while the others exchange gradients and wait for its own; it goes on
once "cut" is there.
"""

import functools
import runpy
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator

from tests.support.processes.rendezvous import wait_for_imports

step, seconds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
sys.argv = [sys.argv[0], *sys.argv[4:]]
backward = Accelerator.backward
passes = 0


def pause_before_backward(self: Accelerator, *args: object, **kwargs: object) -> None:
    global passes
    passes += 1
    if passes == step and dist.get_rank() == dist.get_world_size() // 2:
        (folder / "in step").touch()
        give_up = time.monotonic() + 120
        while not (folder / "cut").exists() and time.monotonic() < give_up:
            time.sleep(0.02)
    backward(self, *args, **kwargs)


def init_process_group(*args: object, **kwargs: object) -> None:
    wait_for_imports()
    original(*args, **kwargs, timeout=timedelta(seconds=seconds))


original = dist.init_process_group
dist.init_process_group = functools.wraps(original)(init_process_group)
Accelerator.backward = pause_before_backward
runpy.run_module("hf_lowprec", run_name="__main__", alter_sys=False)
